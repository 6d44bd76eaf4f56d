"""Rewards on a Ray cluster of two nodes on this machine; `uv sync --extra ray` first."""

import time
from pathlib import Path

import pytest

from memjax.rewards import score
from memjax.rewards.pool import Item
from tests.ray_cluster import two_nodes

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore::Warning")]

HERE = str(Path(__file__).parent)


def unruly(prediction):
    return Item("unruly_metrics:by_prediction", prediction, ("gold",))


@pytest.fixture(scope="module")
def cluster():
    with two_nodes(HERE) as nodes:
        yield nodes


@pytest.fixture
def make_pool(cluster):
    from memjax.rewards.ray_pool import RayRewardPool

    return RayRewardPool


def test_every_node_scores_and_the_values_are_those_of_score_in_order(make_pool):
    items = [Item(metric, f"fox {i}", ("fox 1", "2")) for metric in ("em", "f1", "sub_em") for i in range(20)]
    slow = [Item("unruly_metrics:process_id_after_a_while", "", ("gold",))] * 8
    with make_pool(workers=1) as pool:
        assert pool.nodes == 2
        assert [result.value for result in pool.map(items)] == [score(i.metric, i.prediction, i.answers) for i in items]
        assert len({result.value for result in pool.map(slow)}) == 2


@pytest.mark.parametrize(
    ("prediction", "error"),
    [("hang", "took longer than 1 s"), ("crash", "ended its process (signal 9)"), ("raise", "raised LookupError")],
)
def test_an_answer_that_breaks_its_metric_costs_only_its_own_score(make_pool, prediction, error):
    with make_pool(workers=1, timeout=1.0) as pool:
        results = pool.map([unruly("fine"), unruly(prediction), unruly("fine"), unruly("fine")])
    assert error in results[1].error
    assert [result.value for result in results] == [1.0, 0.0, 1.0, 1.0]


async def test_it_can_be_awaited(make_pool):
    with make_pool(workers=1) as pool:
        results = await pool.map_async([Item("em", "a", ("a",)), Item("em", "b", ("a",))])
    assert [result.value for result in results] == [1.0, 0.0]


def test_an_unknown_metric_is_refused_before_any_work(make_pool):
    with make_pool(workers=1) as pool, pytest.raises(ValueError, match=r"'subem'; did you mean 'sub_em'\?"):
        pool.submit(Item("subem", "a", ("a",)))


def test_closing_ends_items_under_way_and_cancels_those_that_wait(make_pool):
    pool = make_pool(workers=1, timeout=60.0)
    pool.map([unruly("fine")] * 4)
    under_way = [pool.submit(unruly("hang")) for _ in range(2)]
    waiting = pool.submit(unruly("fine"))
    while not all(future.running() for future in under_way):
        time.sleep(0.01)
    pool.close()
    assert [future.result().error for future in under_way] == ["the reward pool was closed"] * 2
    assert waiting.cancelled()


def test_what_a_node_was_scoring_when_it_died_is_scored_on_another(make_pool, cluster):
    nodes, second = cluster
    slow = Item("unruly_metrics:process_id_after_a_while", "", ("gold",))
    with make_pool(workers=1) as pool:
        pool.map([slow] * 2)
        futures = [pool.submit(slow) for _ in range(12)]
        nodes.remove_node(second, allow_graceful=False)
        results = [future.result() for future in futures]
        assert pool.nodes == 1
    assert [result.error for result in results] == [None] * 12
    assert all(result.value > 0 for result in results)


def test_without_a_cluster_or_with_settings_that_cannot_work_it_says_so():
    from memjax.rewards.ray_pool import RayRewardPool

    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        RayRewardPool(workers=0)
    ray.shutdown()
    with pytest.raises(RuntimeError, match=r"there is no Ray cluster: call ray\.init\(\) first"):
        RayRewardPool()
