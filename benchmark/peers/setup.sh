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

fetch() { # NAME URL COMMIT PATH: that path of the repository, as it was at the commit
    [ -d "$folder/$1" ] || git clone --quiet --no-checkout "$2" "$folder/$1"
    git -C "$folder/$1" checkout --quiet "$3" -- "$4"
    echo "$1: $3"
}

mkdir -p "$folder"
fetch cleanrl "$CLEANRL_URL" fe8d8a03c41a7ef5b523e2e354bd01c363e786bb cleanrl
fetch cleanmarl "$CLEANMARL_URL" 7fe335815e5062b354459e54bac68a0a00818cc0 cleanmarl
fetch JaxMARL "$JAXMARL_URL" c793d095618c6d3edfb5632802348f57b70a4b94 baselines

# skrl needs nothing else that the project has not; its dependencies would bring another torch.
"$python" -m pip install --quiet --upgrade --no-deps --target "$folder/skrl" skrl==2.1.1
# Nor does DI-engine, of what its package asks for: an old NumPy, Gym and much that its IMPALA does not use.
"$python" -m pip install --quiet --upgrade --no-deps --target "$folder/ding" -r "$here/ding.txt"
# JaxMARL gets an environment of its own: its baselines need more of JAX, and the project's version is its own.
"$python" -m venv "$folder/jax"
"$folder/jax/bin/python" -m pip install --quiet -r "$here/jaxmarl.txt"
"$folder/jax/bin/python" -m pip install --quiet --no-deps jaxmarl==0.2.0
echo "done; now: python benchmark/speed.py --table --peers $folder"
