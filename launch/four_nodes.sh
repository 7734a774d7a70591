#!/usr/bin/env bash
# A distributed job on four nodes, started on each of them. All options: launch/nodes.sh.
#
#   bash launch/four_nodes.sh --master HOST --node-rank R --config FILE [--section.key value …]
#   srun bash launch/four_nodes.sh --config FILE …        rank and master from Slurm (launch/slurm/nodes.sbatch)
exec bash "$(dirname "$0")/nodes.sh" --nodes 4 "$@"
