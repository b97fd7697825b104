#!/usr/bin/env bash
# Submit a run to a running Ray cluster (`ray job submit`). The driver runs on the cluster's head and continues when this
# terminal is closed.
#
# Files are not copied: CONFIG and all paths in it are paths on the cluster's machines.
#
# Run it on the head, or on a machine to which its port 8265 is forwarded (`ray dashboard ray_up.yml`):
#
#   ./submit.sh /shared/run.yaml [a.b=value ...]     # start a run
#   ./submit.sh --resume /shared/runs/cluster        # resume one
#
# Ray's token is read from ~/.ray/auth_token, or from the file that RAY_AUTH_TOKEN_PATH names. Secrets of the run (such
# as WANDB_API_KEY) belong in the environment of `ray start` or in files on the machines: Ray's dashboard shows commands
# and --runtime-env-json.
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
