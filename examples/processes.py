"""The workers of `simulated.py` as processes that torchrun starts, on one machine or on several.

    torchrun --nproc-per-node 4 examples/processes.py

On two machines, run on each, with `--node-rank 1` on the second:

    torchrun --nnodes 2 --node-rank 0 --master-addr FIRST_MACHINE --master-port 29500 --nproc-per-node 2 examples/processes.py

Prints what `simulated.py` prints, and the same numbers.
"""

import gc

import torch.distributed as dist
from simulated import tell, train


def main():
    dist.init_process_group("gloo")  # "nccl" where each process has a GPU of its own
    try:
        result = train(dist.group.WORLD)
        if dist.get_rank() == 0:
            tell(dist.get_world_size(), *result)
    finally:
        # A clean end: gloo may abort at exit while a group exists, or while anything still refers to one.
        dist.destroy_process_group()
        gc.collect()


if __name__ == "__main__":
    main()
