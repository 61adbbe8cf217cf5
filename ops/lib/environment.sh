# Sourced by the commands in ops/: makes, or reuses, the virtual environment of this checkout.
#
# After `ensure_environment`, the working directory is the checkout, $PYTHON is its interpreter and the
# environment's programs come first on PATH. pip's own configuration decides where packages come from.

find_python() {
    local candidate
    for candidate in ${SPARSEKV_PYTHON:-} python3 python3.12 python3.11; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
            >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    {
        echo "error: Python 3.11 or 3.12 with the venv module is needed."
        echo "  found: $(python3 --version 2>&1 || true)"
        echo "  Install one, or name it: SPARSEKV_PYTHON=/path/to/python3.12 $0"
        echo "  (on Debian and Ubuntu the venv module is the package python3-venv)"
    } >&2
    return 1
}

# What the environment was made from: it is made anew when requirements, tested versions or the place change.
environment_key() {
    "$1" - "$PWD" pyproject.toml ops/lib/tested-versions.txt <<'PY'
import hashlib, pathlib, sys

place, *files = sys.argv[1:]
digest = hashlib.sha256()
for file in files:
    digest.update(pathlib.Path(file).read_bytes())
digest.update(f"{place} {sys.version_info[:2]}".encode())
print(digest.hexdigest())
PY
}

install_environment() {
    local system_python=$1 key=$2 stamp=$3
    echo "Installing into .venv with $("$system_python" --version) (once; a few minutes) ..." >&2
    rm -f "$stamp"
    "$system_python" -m venv --clear .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint ops/lib/tested-versions.txt --editable '.[dev]' >&2
    # These two ask for openai below 3, and work with 3, which the other clients are tested with.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
        --constraint ops/lib/tested-versions.txt llama-index-llms-openai llama-index-llms-openai-like >&2
    printf '%s\n' "$key" >"$stamp"
}

ensure_environment() {
    cd "$(dirname "${BASH_SOURCE[0]}")/../.."
    local stamp=.venv/.sparsekv-installed system_python key lock
    system_python=$(find_python) || exit 1
    key=$(environment_key "$system_python")
    if [[ ! -x .venv/bin/python || "$(cat "$stamp" 2>/dev/null)" != "$key" ]]; then
        if command -v flock >/dev/null; then
            # Two commands started at once must not install into each other's half-made environment.
            exec {lock}>.venv.lock
            flock "$lock"
        fi
        if [[ ! -x .venv/bin/python || "$(cat "$stamp" 2>/dev/null)" != "$key" ]]; then
            install_environment "$system_python" "$key" "$stamp"
        fi
        [[ -z "${lock:-}" ]] || exec {lock}>&-
    fi
    PYTHON=$PWD/.venv/bin/python
    PATH=$PWD/.venv/bin:$PATH
    # Nothing here may reach out to a model hub; the numba cache makes the second run start warm.
    export PYTHON PATH HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false
}
