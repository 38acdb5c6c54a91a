# dsparkd in a container. The torch wheel brings CUDA; the host brings the driver and its container toolkit:
#   docker build -t dsparkd .
#   docker run --gpus all --ipc=host -p 8000:8000 \
#     -v /etc/dsparkd:/etc/dsparkd:ro -v /var/lib/dsparkd:/var/lib/dsparkd dsparkd
FROM python:3.12-slim

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

# For the C parts at build time, and for Triton, which compiles its launchers, at run time.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --system --uid 10001 --create-home --home-dir /var/cache/dsparkd dsparkd \
    && mkdir -p /etc/dsparkd /var/lib/dsparkd \
    && chown dsparkd:dsparkd /var/lib/dsparkd

WORKDIR /opt/dsparkd

# The large layer first: it changes only with torch.
RUN python -m pip install --quiet torch==2.13.0

COPY pyproject.toml setup.py README.md LICENSE ./
COPY dsparkd ./dsparkd
COPY conf ./conf
RUN python -m pip install --quiet .

COPY conf/prod.toml /etc/dsparkd/dsparkd.toml

USER dsparkd
EXPOSE 8000
STOPSIGNAL SIGTERM
# Loading a large checkpoint takes minutes; until then nobody listens.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health_scheduler', timeout=4)"]
ENTRYPOINT ["dsparkd"]
CMD ["--config", "/etc/dsparkd/dsparkd.toml"]
