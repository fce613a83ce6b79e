# A GPU server: vLLM's own image, and the plugin in it.
#   docker build -f containers/gpu.Dockerfile -t vidspec .
#   docker run --gpus all -p 8000:8000 vidspec TARGET --speculative-config '{"method": "vidspec", "model": "DRAFT", "num_speculative_tokens": 5}'
ARG VLLM=0.33.0
FROM vllm/vllm-openai:v${VLLM}
COPY pyproject.toml README.md LICENSE /plugin/
COPY vllm_vidspec /plugin/vllm_vidspec
COPY kernels /plugin/kernels
# What it depends on comes with vLLM or is small; vLLM and torch stay as they are.
RUN python3 -m pip install --no-cache-dir /plugin && vidspec --version && rm -r /plugin
ENTRYPOINT ["vllm", "serve"]
