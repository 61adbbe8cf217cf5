# usage: run.sh small|"" : all cases, in parallel where small, one after the other else
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
P=${PY:-python3}
jobs() {
cat <<'J'
cw 1 dab
cw 1 ceh
cw 1 fgi
cw 1s abeh
c 1 ab
c 1 eh
w 1 abh
n 1 ab
cw own4 abeh
cw own8 abeh
cw 4@1 abe
cw 16@1 dmn
cw 16@1 opq
c 16@1 d
cw 64@1 dm
old 1 d
old 1s d
old own4 d
old own8 d
old 4@1 d
old 16@1 d
old 64@1 d
bf16 1 d
bf16 1s d
bf16 own4 d
bf16 own8 d
bf16 4@1 d
bf16 16@1 d
bf16 64@1 d
J
}
if [ "$1" = small ]; then
  jobs | xargs -P 14 -L 1 bash -c 'V=$0 timeout 120 '$P' trial/shapes.py $1 $2 small 2>&1 | grep -v Warn | tail -4'
else
  jobs | while read v c s; do V=$v timeout 60 $P trial/shapes.py $c $s </dev/null 2>&1 | grep "$v $c"; done
fi
