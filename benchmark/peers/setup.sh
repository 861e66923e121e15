#!/bin/bash
# Fetch the peers that benchmark/speed.py measures beside: bash benchmark/peers/setup.sh FOLDER
# Their code at fixed commits, and what they need that the project's own environment has not, all of it below FOLDER.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:?usage: setup.sh FOLDER}
python=${PEERS_PYTHON:-$here/../../.venv/bin/python}
CLEANRL_URL=${CLEANRL_URL:-https://github.com/vwxyzjn/cleanrl}
CLEANMARL_URL=${CLEANMARL_URL:-https://github.com/AmineAndam04/cleanmarl}
JAXMARL_URL=${JAXMARL_URL:-https://github.com/FLAIROx/JaxMARL}
TORCHBEAST_URL=${TORCHBEAST_URL:-https://github.com/facebookresearch/torchbeast}
SAMPLE_FACTORY_URL=${SAMPLE_FACTORY_URL:-https://github.com/alex-petrenko/sample-factory}

fetch() { # NAME URL COMMIT PATH: that path of the repository, as it was at the commit
    [ -d "$folder/$1" ] || git clone --quiet --no-checkout "$2" "$folder/$1"
    git -C "$folder/$1" checkout --quiet "$3" -- "$4"
    echo "$1: $3"
}

mkdir -p "$folder"
fetch cleanrl "$CLEANRL_URL" fe8d8a03c41a7ef5b523e2e354bd01c363e786bb cleanrl
fetch cleanmarl "$CLEANMARL_URL" 7fe335815e5062b354459e54bac68a0a00818cc0 cleanmarl
fetch JaxMARL "$JAXMARL_URL" c793d095618c6d3edfb5632802348f57b70a4b94 baselines
fetch torchbeast "$TORCHBEAST_URL" 0af07b051a2176a8f9fd20c36891ba2bba6bae68 torchbeast
fetch sample-factory "$SAMPLE_FACTORY_URL" 1894bd1e5e6f741726115e9a69569780906c171c sample_factory

# skrl needs nothing else that the project has not; its dependencies would bring another torch.
"$python" -m pip install --quiet --upgrade --no-deps --target "$folder/skrl" skrl==2.1.1
# Nor does BenchMARL, which asks for an older torchrl.
"$python" -m pip install --quiet --upgrade --no-deps --target "$folder/benchmarl" benchmarl==1.5.2
# Nor does DI-engine, of what its package asks for: an old NumPy, Gym and much that its IMPALA does not use.
"$python" -m pip install --quiet --upgrade --no-deps --target "$folder/ding" -r "$here/ding.txt"
# RLlib, a part of the Ray that is there, and Sample Factory want versions of their own of a few packages.
"$python" -m pip install --quiet --upgrade --no-deps --target "$folder/rllib" -r "$here/rllib.txt"
"$python" -m pip install --quiet --upgrade --no-deps --target "$folder/sf" -r "$here/sample_factory.txt"
# JaxMARL gets an environment of its own: its baselines need more of JAX, and the project's version is its own.
"$python" -m venv "$folder/jax"
"$folder/jax/bin/python" -m pip install --quiet -r "$here/jaxmarl.txt"
"$folder/jax/bin/python" -m pip install --quiet --no-deps jaxmarl==0.2.0
echo "done; now: python benchmark/speed.py --table --peers $folder"
