#!/usr/bin/env bash
# A distributed job on this node alone, eight GPUs unless --gpus says otherwise. All options: launch/nodes.sh.
#
#   bash launch/one_node.sh --job cache_teacher --config FILE [--section.key value …]
#   bash launch/one_node.sh --config FILE [--section.key value …]
exec bash "$(dirname "$0")/nodes.sh" --nodes 1 "$@"
