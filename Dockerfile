# docker build --target cpu -t lockstep:cpu .
# docker build --target cuda -t lockstep:cuda .      docker run --gpus all ... --device cuda
ARG CPU=debian:12-slim
ARG CUDA=nvidia/cuda:13.0.2-cudnn

FROM ${CPU} AS cpu-build
WORKDIR /source
# What to install changes less often than the source: its layer stays.
COPY scripts/setup.sh scripts/
RUN scripts/setup.sh package
COPY . .
RUN cmake --preset release -D LOCKSTEP_TESTS=OFF && cmake --build --preset release --target packages

FROM ${CUDA}-devel-ubuntu24.04 AS cuda-build
WORKDIR /source
COPY scripts/setup.sh scripts/
RUN scripts/setup.sh package
COPY . .
RUN cmake --preset cuda -D LOCKSTEP_TESTS=OFF && cmake --build --preset cuda --target packages

FROM ${CUDA}-runtime-ubuntu24.04 AS cuda
RUN --mount=type=bind,from=cuda-build,source=/source/build/cuda/packages,target=/packages \
  apt-get update && apt-get install -y --no-install-recommends /packages/lockstep_*.deb && rm -rf /var/lib/apt/lists/*
ENTRYPOINT ["lockstep"]

FROM ${CPU} AS cpu
RUN --mount=type=bind,from=cpu-build,source=/source/build/release/packages,target=/packages \
  apt-get update && apt-get install -y --no-install-recommends /packages/lockstep_*.deb && rm -rf /var/lib/apt/lists/*
ENTRYPOINT ["lockstep"]
