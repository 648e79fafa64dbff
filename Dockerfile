# Dockerfile: images of the program, for the CPU and for GPUs. Workers of scripts/mpijob.yaml run their sshd.
#
#   docker build --target cpu -t train_gpt2 .
#   docker build --target cuda -t train_gpt2:cuda --build-arg CUDA_ARCHS="80 90a" .
ARG CPU_IMAGE=debian:13-slim
ARG CUDA_IMAGE=nvidia/cuda:13.0.0-cudnn

FROM ${CPU_IMAGE} AS cpu-build
WORKDIR /src
COPY . .
RUN scripts/install.sh && make -j"$(nproc)" CUDA=0 && make CUDA=0 install

FROM ${CUDA_IMAGE}-devel-ubuntu24.04 AS cuda-build
ARG CUDA_ARCHS="80 90a"
WORKDIR /src
COPY . .
RUN scripts/install.sh && make -j"$(nproc)" CUDA=1 CUDA_ARCHS="$CUDA_ARCHS" && \
    make CUDA=1 CUDA_ARCHS="$CUDA_ARCHS" install

FROM ${CPU_IMAGE} AS cpu
COPY scripts/container.sh /tmp/
RUN /tmp/container.sh
COPY --from=cpu-build /usr/local /usr/local
WORKDIR /data
CMD ["train_gpt2", "--help"]

FROM ${CUDA_IMAGE}-runtime-ubuntu24.04 AS cuda
COPY scripts/container.sh /tmp/
RUN /tmp/container.sh
COPY --from=cuda-build /usr/local/bin /usr/local/bin
WORKDIR /data
CMD ["train_gpt2cu", "--help"]
