"""Write what the recipes of docs/benchmarks.md send: held-out videos as mp4 files, and lists of them for each client.

    python benchmarks/clients/make_data.py --out runs/clients [--videos 8]

Under the folder: `videos/*.mp4`, `sharegpt.json` for `vllm bench serve`, `aiperf.jsonl`,
and `lmms/`, a task of lmms-eval.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import captioned
from vllm_vidspec.shapeworld import world

HERE = Path(__file__).resolve().parent
LONG_QUESTION = "please describe the clip ."  # `vllm bench serve` leaves out prompts of fewer than four tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--videos", type=int, default=8)
    options = parser.parse_args()
    out = options.out.resolve()
    (out / "videos").mkdir(parents=True, exist_ok=True)
    entries, docs = [], []
    for i in range(options.videos):
        sample, path = captioned.held_out(i), out / "videos" / f"{i:03d}.mp4"
        world.write_mp4(sample.frames, path)
        turns = [{"from": "human", "value": LONG_QUESTION}, {"from": "gpt", "value": sample.caption}]
        entries.append({"id": f"{i:03d}", "video": str(path), "conversations": turns})
        docs.append({"index": i, "video": str(path), "question": world.QUESTION, "answer": sample.caption})
    (out / "sharegpt.json").write_text(json.dumps(entries, indent=1) + "\n")
    turns = [{"text": doc["question"], "video": doc["video"]} for doc in docs]
    (out / "aiperf.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    task = out / "lmms"
    shutil.copytree(HERE / "lmms_task", task, dirs_exist_ok=True)
    (task / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    template = (task / "shapeworld.yaml").read_text()
    (task / "shapeworld.yaml").write_text(template.replace("FOLDER", str(task)))
    print(f"{len(entries)} videos in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
