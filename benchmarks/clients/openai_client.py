"""Ask a server about a video with the openai package, and with LangChain's where it is installed.

python benchmarks/clients/openai_client.py --url http://127.0.0.1:8000/v1 --video runs/clients/videos/000.mp4
"""

import argparse
import base64
import sys
from pathlib import Path
from typing import Any


def content(video: Path, question: str) -> list[dict[str, Any]]:
    """Return a user turn; the video travels inside the request."""
    data = base64.b64encode(video.read_bytes()).decode()
    return [
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}},
        {"type": "text", "text": question},
    ]


def by_openai(url: str, turn: list[dict[str, Any]]) -> str:
    """Stream an answer, as `openai` does."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none")
    stream = client.chat.completions.create(
        model="target", messages=[{"role": "user", "content": turn}], temperature=0, max_tokens=64, stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def by_langchain(url: str, turn: list[dict[str, Any]]) -> str:
    """Ask through LangChain's chat model for OpenAI's API."""
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=url, api_key="none", model="target", temperature=0, max_tokens=64)
    return str(model.invoke([HumanMessage(content=turn)]).content)


def by_litellm(url: str, turn: list[dict[str, Any]]) -> str:
    """Ask through LiteLLM, whose name for such a server is `hosted_vllm`."""
    import litellm

    messages = [{"role": "user", "content": turn}]
    answer = litellm.completion(
        model="hosted_vllm/target", api_base=url, messages=messages, temperature=0, max_tokens=64
    )
    return str(answer.choices[0].message.content)


def main() -> int:
    """Ask through each client that is there; all answers must be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--video", type=Path, required=True)
    parser.add_argument("--question", default="describe the video")
    options = parser.parse_args()
    turn, answers = content(options.video, options.question), {}
    for name, ask in (("openai", by_openai), ("langchain", by_langchain), ("litellm", by_litellm)):
        try:
            answers[name] = ask(options.url, turn)
        except ImportError:
            print(f"{name}: not installed")
            continue
        print(f"{name}: {answers[name]}")
    return 0 if len(set(answers.values())) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
