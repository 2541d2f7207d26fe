# GTI Serve. Build: make image (VARIANT=cpu or gpu). Run, once with a key to call it by:
#   docker run --rm -v gti:/data gti-serve:cpu keys add NAME --scope admin
#   docker run -p 8000:8000 -v gti:/data gti-serve:cpu
#
# BASE_IMAGE: Debian 12 with python3 3.11 and ca-certificates; python3-venv, where the Python is
# Debian's own. Both stages use it, since an environment refers to the Python that made it.
# Behind a package mirror: --secret id=pip.conf,src=FILE hands pip its settings for the build only.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS base
# vLLM's CPU build links to libnuma.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 libstdc++6 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin

FROM base AS build
ARG VARIANT=cpu
ENV PIP_NO_CACHE_DIR=1
WORKDIR /src
# The packages change with the locks only, so they are a layer of their own before the code.
COPY scripts/setup.py scripts/lockfile.py scripts/pipcall.py scripts/
COPY requirements/*.lock requirements/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 scripts/setup.py --venv /opt/gti --variant "${VARIANT}" --sets demo --project none
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY requirements/*.in requirements/
COPY gti_core gti_core
COPY service service
RUN python3 scripts/setup.py --venv /opt/gti --variant "${VARIANT}" --sets demo --project wheel

FROM base
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /data gti \
    && install --directory --owner=gti --group=gti /data
COPY --from=build /opt/gti /opt/gti
COPY LICENSE NOTICE /app/
COPY examples /app/examples
ENV PATH=/opt/gti/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1 \
    GTI_DATA_DIR=/data \
    GTI_BUNDLE=/app/examples/demo-bundle
WORKDIR /app
USER 10001:10001
VOLUME /data
EXPOSE 8000
# No proxy settings are read here: the address is this container's own.
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s CMD ["python", "-c", "\
import http.client, os, sys; \
c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('GTI_PORT') or 8000), timeout=4); \
c.request('GET', '/readyz'); \
sys.exit(c.getresponse().status != 200)"]
# Inside a container the loopback address reaches nobody, so all addresses are named outright.
ENTRYPOINT ["gti"]
CMD ["serve", "--host", "0.0.0.0"]
