"""Lists mshadow's kernels of libmxnet.so for map_plans.cc, as far as all their types are in the
wheel's headers or defined there: python write_map_plans.py libmxnet.so > map_plans.inc"""

import mmap
import re
import subprocess
import sys

DEFINED = "mxnet::op::mshadow_op::identity"
NAME = rb"\0(_Z[0-9A-Za-z_]*(?:13MapPlan|18MapPlanLarge)Kernel[0-9A-Za-z_]*)(?=\0)"


def template_arguments(function):
    begin = function.index("<", function.index("Kernel")) + 1
    depth, end = 1, begin
    while depth:
        depth += {"<": 1, ">": -1}.get(function[end], 0)
        end += 1
    return function[begin : end - 1]


with open(sys.argv[1], "rb") as file:
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        names = sorted({name.decode() for name in re.findall(NAME, library)})
demangled = subprocess.run(
    ["c++filt"], input="\n".join(names), stdout=subprocess.PIPE, text=True, check=True
)
for name, function in zip(names, demangled.stdout.splitlines()):
    if "mxnet::" not in function.replace(DEFINED, ""):
        print(f'{{"{name}", run<{template_arguments(function)}>}},')
