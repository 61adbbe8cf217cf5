# usage: run.sh small|whole: all cases, in parallel where small, one after the other else
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
P=${PY:-python3}
jobs() {
cat <<'J'
new 1:d own4:d own8:dre 4@1:d 16@1:drstu 64@1:drs 1s:d 16@1s:d 1/64:d 16@1/64:d 1/256/8:dvwx own4/256/8:dvwx 1/128/8:d 16@1/128/8:dr 1/128/16:d
old 1:d own4:d own8:d 4@1:d 16@1:d 64@1:d 1s:d 16@1s:d 1/64:d 16@1/64:d 1/256/8:d own4/256/8:d 1/128/8:d 16@1/128/8:d 1/128/16:d
bf16 1:d own4:d own8:d 16@1:d 64@1:d 1s:d 1/64:d 16@1/64:d 1/256/8:d own4/256/8:d
J
}
if [ "$1" = small ]; then
  jobs | while read v cases; do for c in $cases; do s=${c#*:}; while [ -n "$s" ]; do echo $v ${c%:*}:${s:0:1}; s=${s:1}; done; done; done |
    xargs -P 16 -L 1 bash -c 'V=$0 timeout 100 '$P' trial/shapes.py small $1 2>&1 | grep "$0 "'
else
  jobs | while read v cases; do V=$v timeout 100 $P trial/shapes.py whole $cases </dev/null 2>&1 | grep -v -i warn; done
fi
