"""Times a torch.nn.BatchNorm2d: for each line on standard input, prints the seconds of a forward
and a backward. Arguments: threads, 1 for a relu after it, the sizes of x."""

import sys
import time

import torch


def main():
    threads, relu, *shape = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    layer = torch.nn.BatchNorm2d(shape[1])
    small = torch.zeros(1 << 17)
    x, dy = torch.randn(shape, requires_grad=True), torch.randn(shape)

    def step():
        # MXNet's layers overwrite the gradient and do not add to it.
        x.grad = None
        start = time.perf_counter()
        y = layer(x)
        y = torch.relu(y) if relu else y
        middle = time.perf_counter()
        y.backward(dy)
        return middle - start, time.perf_counter() - middle

    for _ in sys.stdin:
        torch.add(small, 1)  # wakes the threads, and leaves the caches as they are
        print(*step(), flush=True)


if __name__ == "__main__":
    main()
