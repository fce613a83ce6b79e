# The demo without a GPU: one video, one question, two servers, one table.
#   docker build -f containers/cpu-demo.Dockerfile --build-arg CPU_TORCH_INDEX=ADDRESS -t vidspec-demo .
#   docker run --rm vidspec-demo
FROM python:3.11-slim
# PyTorch's index of CPU builds: its address is on PyTorch's install page under Linux / Pip / CPU.
ARG CPU_TORCH_INDEX
ENV PIP_NO_CACHE_DIR=1 OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /plugin
COPY . .
RUN PIP_EXTRA_INDEX_URL=${CPU_TORCH_INDEX} make setup && .venv/bin/vidspec doctor
ENTRYPOINT [".venv/bin/vidspec", "demo"]
