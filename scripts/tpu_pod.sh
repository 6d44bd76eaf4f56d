#!/usr/bin/env bash
# Train on a TPU slice of several hosts: the same command on each, from your own machine, through gcloud.
#
#   TPU=my-slice ZONE=us-east5-a scripts/tpu_pod.sh setup gs://my-bucket/memjax.tar.gz
#   TPU=my-slice ZONE=us-east5-a scripts/tpu_pod.sh train --config configs/train/memagent_qwen2_5_7b.yaml out=/mnt/runs/7b ...
#   TPU=my-slice ZONE=us-east5-a scripts/tpu_pod.sh stop
#
# setup  fetches this source tree (an archive made with `git archive`) to every host and installs it with the tpu extra
# train  starts `python -m memjax.train` with the words that follow on every host, of which the first writes and speaks
# stop   asks the training to end after its step, with its state kept (SIGTERM)
#
# out, model and data must be paths that every host reaches (a mounted bucket or file store): docs/pods.md.
# DRY_RUN=1 prints the commands instead of running them.
set -euo pipefail

usage() {
    sed -n '2,14s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

[[ $# -ge 1 ]] || usage
: "${TPU:?set TPU to the name of the slice}" "${ZONE:?set ZONE to its zone}"

# What a shell on the host would take for one word each.
quoted() { printf '%q ' "$@"; }

on_hosts() { # which hosts, command
    local command=(gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker="$1" --command="$2")
    if [[ -n "${DRY_RUN:-}" ]]; then
        quoted "${command[@]}"
        echo
    else
        "${command[@]}"
    fi
}

action=$1
shift
case "$action" in
setup)
    [[ $# -eq 1 ]] || usage
    archive=$(quoted "$1")
    on_hosts all "mkdir -p ~/memjax && cd ~/memjax && gcloud storage cat $archive | tar xz \
&& python3 -m pip install --user -q uv && python3 -m uv sync --no-dev --extra tpu"
    ;;
train)
    [[ $# -ge 1 ]] || usage
    # auto: jax learns from the TPU's metadata who the other hosts are. The log of each host stays with it.
    on_hosts all "set -o pipefail; cd ~/memjax && MEMJAX_DISTRIBUTED=auto .venv/bin/python -m memjax.train $(quoted "$@") 2>&1 \
| tee -a ~/memjax-train.log"
    ;;
stop)
    [[ $# -eq 0 ]] || usage
    on_hosts all "pkill -TERM -u \$(id -u) -f 'python -m memjax.train'"
    ;;
*) usage ;;
esac
