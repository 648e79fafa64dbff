#!/usr/bin/env bash
# ptxas_cluster_release.sh: mbarrier.arrive at another block's barrier is cheap only if it leaves out its scope.
#
# Guess: mbarrier.arrive.release.cluster.shared::cluster.b64 is mbarrier.arrive.shared::cluster.b64 spelled out. Release
# is the default, a barrier of another block can serve no smaller scope than the cluster, and libcudacxx offers no other
# scope for it. So ptxas makes the same instructions of both.
# Behaviour: PTX ISA lets the form without qualifiers be release at the scope of the CTA, also at a barrier of another
# block. ptxas makes one arrive of it. The form with .release.cluster gets two MEMBAR, an ERRBAR and a CGAERRBAR before
# the arrive, and so do arrive.expect_tx and a barrier of the own block; .relaxed.cluster gets none. A GEMM with
# clusters of two blocks that signals "stage read" after each stage took 481 us on an H200 with the long form and 382 us
# with the short one (65536 x 2304 x 768, bf16). CUTLASS uses the short form.
# Versions: ptxas 12.8.93, 13.0.88 and 13.5.37 of PyPI, for sm_90a; no GPU is needed.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/barriers.py" <<'CODE'
import pathlib
import struct
import subprocess
import sys

version, ptxas, folder = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
OPCODES = {0x992: "MEMBAR", 0x9AB: "ERRBAR", 0x5AB: "CGAERRBAR", 0x9A7: "arrive"}
PTX = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u32 place) {{
    .reg .b32 %r;
    ld.param.u32 %r, [place];
    mbarrier.{} _, [%r]{};
    ret;
}}
"""
for form in ("arrive", "arrive.release.cta", "arrive.relaxed.cluster", "arrive.release.cluster", "arrive.expect_tx",
             "arrive.expect_tx.release.cluster"):
    (folder / "k.ptx").write_text(PTX.format(form + ".shared::cluster.b64", ", 16" if "expect" in form else ""))
    subprocess.run([ptxas, "-arch=sm_90a", folder / "k.ptx", "-o", folder / "k.cubin"], check=True)
    cubin = (folder / "k.cubin").read_bytes()
    table, (count, names) = struct.unpack_from("<Q", cubin, 40)[0], struct.unpack_from("<HH", cubin, 60)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]
    name_of = lambda section: cubin[sections[names][4] + section[0] :].split(b"\0", 1)[0]
    begin, size = next((s[4], s[5]) for s in sections if name_of(s) == b".text.k")
    opcodes = (struct.unpack_from("<H", cubin, at)[0] & 0xFFF for at in range(begin, begin + size, 16))
    print(version, form + ":", *(OPCODES[opcode] for opcode in opcodes if opcode in OPCODES))
CODE
for package in nvidia-cuda-nvcc-cu12==12.8.93 nvidia-cuda-nvcc==13.0.88 nvidia-cuda-nvcc==13.5.37; do
    version=${package#*==}
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q --no-deps $package
    python3 "$folder/barriers.py" "$version" "$(find "$folder/$version" -name ptxas)" "$folder"
done | tee "$folder/got"

want=$(for version in 12.8.93 13.0.88 13.5.37; do
    echo "$version arrive: arrive
$version arrive.release.cta: arrive
$version arrive.relaxed.cluster: arrive
$version arrive.release.cluster: MEMBAR MEMBAR ERRBAR CGAERRBAR arrive
$version arrive.expect_tx: arrive
$version arrive.expect_tx.release.cluster: MEMBAR MEMBAR ERRBAR CGAERRBAR arrive"
done)
diff <(echo "$want") "$folder/got" && echo "as it was"
