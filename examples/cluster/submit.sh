#!/usr/bin/env bash
# What it does: hands a run to a Ray cluster that is up (`ray job submit`); the driver then runs on the cluster's head,
# and goes on when this terminal is closed.
#
# What it leaves out: copying files. CONFIG and all that it names are paths as the cluster's machines see them.
#
# How to run it, on the head or where its port 8265 is forwarded to (`ray dashboard ray_up.yml`):
#
#   ./submit.sh /shared/run.yaml [a.b=value ...]     # start a run
#   ./submit.sh --resume /shared/runs/cluster        # go on with one
#
# Ray's token is read from ~/.ray/auth_token, or from the file that RAY_AUTH_TOKEN_PATH names. Secrets of the run (such
# as WANDB_API_KEY) belong into the environment of `ray start` or into files on the machines: what stands in a command or
# in --runtime-env-json is shown by Ray's dashboard.
set -euo pipefail

if (($# == 0)); then
    echo "usage: $0 CONFIG [a.b=value ...], or $0 --resume RUN_DIR" >&2
    exit 2
fi

export RAY_AUTH_MODE=token
export RAY_API_SERVER_ADDRESS="${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}"

token_file="${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}"
if [[ -z ${RAY_AUTH_TOKEN:-} && ! -r $token_file ]]; then
    echo "no Ray token in $token_file: copy the one of the cluster's head there (mode 600)" >&2
    exit 2
fi

if [[ $1 == --resume ]]; then
    exec ray job submit -- rlframework train "$@"
fi
exec ray job submit -- rlframework train "$@" worker_group.name=ray
