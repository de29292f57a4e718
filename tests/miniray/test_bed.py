"""What the Ray test bed promises."""

from __future__ import annotations

import sys

import pytest

from tests.miniray import HEAD, RayBed

WHERE = """
import ray
ray.init(address="auto", log_to_driver=False)
@ray.remote(scheduling_strategy="SPREAD")
def where():
    import time
    time.sleep(0.2)
    return ray.util.get_node_ip_address()
print(sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}))
print(ray.get(where.options(num_gpus=2).remote()).startswith("10.77.0."))
"""


def test_every_node_has_an_address_of_its_own(ray_bed: RayBed) -> None:
    for node in (HEAD, ray_bed.nodes[-1]):
        said = ray_bed.run(node, [sys.executable, "-c", WHERE]).stdout
        assert said == f"{sorted(ray_bed.addresses.values())}\nTrue\n"


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [True, False])
def test_a_raylet_that_was_killed_can_join_again(ray_bed: RayBed, is_known: bool) -> None:
    ray_bed.kill_raylet("n3", wait=is_known)
    assert not is_known or ray_bed.addresses["n3"] not in ray_bed.alive()
    ray_bed.heal()
    assert sorted(ray_bed.addresses.values()) == ray_bed.alive()
    assert [process for process in ray_bed.processes("n3") if process.cmdline.partition(" ")[0].endswith("/raylet")]
