"""Ask a server about a video with the openai package, and with LangChain's where it is installed.

python benchmarks/clients/openai_client.py --url http://127.0.0.1:8000/v1 --video runs/clients/videos/000.mp4
"""

import argparse
import base64
import sys
from pathlib import Path
from typing import Any

import openai


def main() -> int:
    """Ask through each client that is there, streamed and not; all answers must be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--video", type=Path, required=True)
    options = parser.parse_args()
    data = base64.b64encode(options.video.read_bytes()).decode()  # the video travels inside the request
    turn: list[dict[str, Any]] = [
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}},
        {"type": "text", "text": "describe the video"},
    ]
    sampling: dict[str, Any] = {"model": "target", "temperature": 0, "max_tokens": 64}
    messages: Any = [{"role": "user", "content": turn}]
    client = openai.OpenAI(base_url=options.url, api_key="none")
    stream = client.chat.completions.create(messages=messages, stream=True, **sampling)
    answers = {"openai": "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)}
    try:
        from langchain_core.messages import HumanMessage
        from langchain_openai import ChatOpenAI
    except ImportError:
        print("langchain: not installed")
    else:
        model = ChatOpenAI(base_url=options.url, api_key="none", **sampling)
        answers["langchain"] = str(model.invoke([HumanMessage(content=turn)]).content)
    for name, answer in answers.items():
        print(f"{name}: {answer}")
    return int(len(set(answers.values())) > 1)


if __name__ == "__main__":
    sys.exit(main())
