"""Run as a program: vanilla vLLM on a video file, in process; its answers as JSON on the last line."""

import json
import os
import sys

from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.user_files import read_video


def main() -> None:
    family, video, question, samplings = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(**pairs.llm_kwargs(family, overrides={"max_num_seqs": 4}))
    prompt = pairs.video_prompt(family, read_video(video), question)
    answers = []
    for sampling in samplings:
        output = llm.generate([prompt], SamplingParams(**sampling), use_tqdm=False)[0].outputs[0]
        answers.append({"token_ids": list(output.token_ids), "text": output.text})
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
