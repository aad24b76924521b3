# What train_imagenet.sh, eval_imagenet.sh and train_synthetic.sh share; read by them, not run.

# Splits the words before "--" (for hvd-elastic run) from those after it (for the recipe), and takes
# --framework out of the former.
split_words() {
    framework=torch
    run_words=()
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        case $1 in
            --framework) [ $# -ge 2 ] || fail "--framework needs torch or tensorflow"
                framework=$2; shift ;;
            --framework=*) framework=${1#*=} ;;
            *) run_words+=("$1") ;;
        esac
        shift
    done
    [ $# -gt 0 ] && shift
    recipe_words=("$@")
    case $framework in
        torch) script=$root/scripts/examples/imagenet.py ;;
        tensorflow) script=$root/scripts/examples/imagenet_keras.py ;;
        *) fail "--framework $framework: it is torch or tensorflow" ;;
    esac
}

fail() {
    echo "error: $1" >&2
    echo "Usage and examples: $0 --help" >&2
    exit 2
}

# Finds the environment of the checkout, or another Python.
find_python() {
    python=${PYTHON:-$root/.venv/bin/python}
    [ -x "$python" ] || python=$(command -v python3) || fail "there is no python3 on PATH"
}

run_recipe() {
    find_python
    exec "$python" -m hvd_elastic.cli.app run "${run_words[@]}" -- "$python" "$script" "${recipe_words[@]}"
}

is_number() { case $1 in '' | *[!0-9]* | 0) return 1 ;; esac }
