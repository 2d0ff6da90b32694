"""Machines of Dataflow as one table: from a name such as v5e-4 to all that a worker of this kind is told.

Facts of Google's pages, which the rows name, and no others: where there is capacity today, only the service knows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

_TPU_PAGE = "https://docs.cloud.google.com/dataflow/docs/tpu/tpu-support"
_TPU_KINDS = {"v5e": "tpu-v5-lite-podslice", "v6e": "tpu-v6e-slice", "v5p": "tpu-v5p-slice"}
_GPU_PAGE = "https://docs.cloud.google.com/dataflow/docs/gpu/gpu-support"


@dataclass(frozen=True)
class Worker:
    """One worker of a job.

    Attributes:
      device: "tpu", "gpu" or "cpu", which must be there; None takes the best that JAX finds.
      devices: how many JAX sees.
      machine_type: of Compute Engine; None leaves it to Dataflow or to the user.
      accelerator: Dataflow's service option worker_accelerator.
      environment: what libtpu must be told in the container, where it cannot ask the machine.
      source: the page from which machine type and accelerator are.
      topology: of a TPU, as its compiler calls it, see `topologies`.
    """

    device: str | None
    devices: int
    machine_type: str | None = None
    accelerator: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    topology: str | None = None


def _tpu(chip: str, topology: str, machine_type: str, name: str) -> Worker:
    sides = [int(side) for side in topology.split("x")]
    # As in https://docs.cloud.google.com/dataflow/docs/tpu/troubleshoot-tpus, which has them for one chip.
    environment = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_HOST_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_HOST_BOUNDS": ",".join(str(side) for side in (*sides, 1)[:3]),
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_ACCELERATOR_TYPE": name,
    }
    accelerator = f"type:{_TPU_KINDS[chip]};topology:{topology}"
    return Worker(
        "tpu", math.prod(sides), machine_type, accelerator, environment, _TPU_PAGE, topology=f"{chip}:{topology}"
    )


def _gpu(kind: str, machine_type: str) -> Worker:
    return Worker("gpu", 1, machine_type, f"type:{kind};count:1;install-nvidia-driver", source=_GPU_PAGE)


# Every configuration of Google's page. v5p is named after its cores, two a chip, the others after their chips.
TPUS = {
    "v5e-1": _tpu("v5e", "1x1", "ct5lp-hightpu-1t", "v5litepod-1"),
    "v5e-4": _tpu("v5e", "2x2", "ct5lp-hightpu-4t", "v5litepod-4"),
    "v5e-8": _tpu("v5e", "2x4", "ct5lp-hightpu-8t", "v5litepod-8"),
    "v6e-1": _tpu("v6e", "1x1", "ct6e-standard-1t", "v6e-1"),
    "v6e-4": _tpu("v6e", "2x2", "ct6e-standard-4t", "v6e-4"),
    "v6e-8": _tpu("v6e", "2x4", "ct6e-standard-8t", "v6e-8"),
    "v5p-8": _tpu("v5p", "2x2x1", "ct5p-hightpu-4t", "v5p-8"),
}
# Those of Google's page that compute in bfloat16 and come one to a machine; the older ones (T4, V100, P100, P4) do not.
GPUS = {
    "l4": _gpu("nvidia-l4", "g2-standard-8"),
    "a100-40gb": _gpu("nvidia-tesla-a100", "a2-highgpu-1g"),
    "a100-80gb": _gpu("nvidia-a100-80gb", "a2-ultragpu-1g"),
}
