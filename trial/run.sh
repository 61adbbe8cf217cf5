# usage: run.sh small|whole: all cases, in parallel where small, one after the other else
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
P=${PY:-python3}
jobs() {
cat <<'J'
cw 1:dabcefghi 1s:abeh own4:abeh own8:abeh 4@1:abe 16@1:dmnopq 64@1:dm
c 1:abeh 16@1:d
w 1:abh
n 1:abh
old 1:d 1s:d own4:d own8:d 4@1:d 16@1:d 64@1:d
bf16 1:d 1s:d own4:d own8:d 4@1:d 16@1:d 64@1:d
J
}
if [ "$1" = small ]; then
  jobs | while read v cases; do for c in $cases; do s=${c#*:}; while [ -n "$s" ]; do echo $v ${c%:*}:${s:0:2}; s=${s:2}; done; done; done |
    xargs -P 15 -L 1 bash -c 'V=$0 timeout 100 '$P' trial/shapes.py small $1 2>&1 | grep "$0 "'
else
  jobs | while read v cases; do V=$v timeout 100 $P trial/shapes.py whole $cases </dev/null 2>&1 | grep -v -i warn; done
fi
