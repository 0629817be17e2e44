# Two images from one file:
#   docker build -t lmcache-server .                    the server (the last stage): no torch, no vLLM, not root
#   docker build -t lmcache-vllm --target vllm .        vLLM with the connector installed
# They share KV through one /dev/shm: see compose.yaml.

# Has to stand before the first stage to be usable in FROM.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY lmcache lmcache
COPY lmcache_server lmcache_server
COPY lmcache_sdk lmcache_sdk
COPY connector connector
# The environment holds the server's own requirements only; the wheel is for the image below.
RUN python -m venv /opt/lmcache \
 && /opt/lmcache/bin/pip install --no-cache-dir . \
 && pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM ${VLLM_IMAGE} AS vllm
# Without extras: torch is vLLM's own and stays as it is.
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    python3 -m pip install --no-cache-dir /dist/*.whl
STOPSIGNAL SIGTERM
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server"]

FROM python:3.11-slim AS server
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin lmcache
COPY --from=build /opt/lmcache /opt/lmcache
# Inside a container loopback reaches nobody; what is reachable from outside is decided by the ports that are published.
ENV PATH=/opt/lmcache/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    LMCACHE_HOST=0.0.0.0 \
    LMCACHE_HTTP_HOST=0.0.0.0
USER 10001:10001
EXPOSE 5555 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s --retries=3 CMD ["lmcache", "ping", "kvcache", "--quiet"]
ENTRYPOINT ["lmcache", "server"]
