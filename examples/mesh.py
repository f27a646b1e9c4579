"""The same workers along one axis of a DeviceMesh, the form that torch's other kinds of parallelism share.

    torchrun --nproc-per-node 2 examples/mesh.py

The optimizer takes a one-dimensional mesh. Of a larger one, pass the axis that joins the workers, such as
`mesh["workers"]`. Prints what `simulated.py` prints, for two workers.
"""

import gc

import torch.distributed as dist
from simulated import tell, train
from torch.distributed.device_mesh import init_device_mesh


def main():
    dist.init_process_group("gloo")
    try:
        result = train_on_mesh()
        if dist.get_rank() == 0:
            tell(dist.get_world_size(), *result)
    finally:
        # A clean end: gloo may abort at exit while a group exists, or while anything, such as a mesh, still refers to one.
        dist.destroy_process_group()
        gc.collect()


def train_on_mesh():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("workers",))
    return train(mesh)


if __name__ == "__main__":
    main()
