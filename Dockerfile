# rlframework with all its distributions; docs/install.md says how to build and run it.
# BASE: an image with pip and Python 3.11 or newer. Its torch is kept if it is of a version that rlframework supports.
ARG BASE=python:3.12
FROM ${BASE}
COPY . /opt/rlframework
RUN cd /opt/rlframework && pip install --no-cache-dir . 'ray[default]' \
        plugins/dtensor plugins/deepspeed plugins/megatron plugins/transformers plugins/vllm plugins/ray plugins/environments \
        plugins/preferences plugins/distillation plugins/serve plugins/report plugins/storage plugins/tools plugins/conformance
WORKDIR /work
ENTRYPOINT ["rlframework"]
CMD ["doctor"]
