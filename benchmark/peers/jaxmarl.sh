#!/bin/bash
# A baseline of JaxMARL, on one thread: jaxmarl.sh PEERS IPPO/ippo_ff_mpe STEPS SEED [KEY=VALUE ...]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
peers=$(cd "$1" && pwd) script=$2
shift 2
export JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=$peers/jax-cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.1
export XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
exec "$peers/jax/bin/python" "$here/run_jaxmarl.py" "$peers/JaxMARL/baselines/$script.py" "$@"
