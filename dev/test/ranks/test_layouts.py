"""test_layouts.py: runs layouts.cpp on four CPU ranks: models of random shapes, trained in random layouts of tensor
parallelism, ZeRO and data parallelism, must have the results of one rank."""

import pytest
from harness import LIMIT, RELEASE, ranks, run


@pytest.mark.parametrize("first, shapes", [(1, 60), pytest.param(61, 180, marks=pytest.mark.slow)])
def test_random_layouts_have_the_results_of_one_rank(first, shapes):
    environment = {**ranks(4).env, "OPENBLAS_NUM_THREADS": 1}
    result = run("mpirun -np 4", RELEASE / "layouts", shapes, first, env=environment, limit=3 * LIMIT)
    assert f"PASS  {shapes} shapes, 0 failed" in result.out, result
