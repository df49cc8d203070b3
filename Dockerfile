# An image with titan_rl and its engines. From the root of the repository, for CPUs or for NVIDIA GPUs:
#   docker build -t titan_rl:cpu --build-arg ENGINE=cpu .
#   docker build -t titan_rl:cuda --build-arg ENGINE=cuda .
# Debian 12's buildah and podman do not find the stage of a FROM by the argument's default: name the engine.
# A run, whose folder is made in the current one (docs/clusters.md has more):
#   docker run --rm --user "$(id -u)" --shm-size 8g -v "$PWD:/work" titan_rl:cpu --config grpo_llama
ARG ENGINE=cpu

FROM python:3.11-slim-bookworm AS cpu

# enroot, and so pyxis, shows GPUs to images that ask for them only. Docker's --gpus and Kubernetes ask themselves.
FROM python:3.11-slim-bookworm AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM ${ENGINE}
ARG ENGINE

# Triton and torch compile code when a run starts; the headers of Python come with the base image.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md LICENSE /opt/titan_rl/
COPY scripts/install.py /opt/titan_rl/scripts/
COPY titan_rl /opt/titan_rl/titan_rl
COPY actors /opt/titan_rl/actors
COPY meshes /opt/titan_rl/meshes
COPY kernels /opt/titan_rl/kernels
COPY train_configs /opt/titan_rl/train_configs

# As scripts/setup does: torch's build for the engine, without packages that text models do not need. Users cannot write
# bytecode there, so it is compiled here; a package may hold files for a later Python, which do not compile.
ENV PATH=/opt/titan_rl/.venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1
RUN python -m venv /opt/titan_rl/.venv \
    && UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 /opt/titan_rl/.venv/bin/python -I /opt/titan_rl/scripts/install.py \
        "$ENGINE" "" /opt/titan_rl/.venv/titan_rl.log \
    && python -m compileall -q -x '/\.venv/' /opt/titan_rl \
    && { python -m compileall -qq /opt/titan_rl/.venv || true; }

# Any user may run it: caches and the compiled code of a user without a home lie in TMPDIR, and /work, where runs are
# made, is everyone's.
RUN useradd --uid 1000 --create-home titan_rl && install --directory --mode 1777 /work
USER 1000
WORKDIR /work
ENTRYPOINT ["titan_rl"]
CMD ["--help"]
