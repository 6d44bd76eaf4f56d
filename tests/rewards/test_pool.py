import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memjax.rewards import score
from memjax.rewards.pool import Item, RewardPool

HERE = Path(__file__).parent
UNRULY = "unruly_metrics:by_prediction"


@pytest.fixture(autouse=True)
def _unruly_metrics_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(HERE)


def unruly(prediction):
    return Item(UNRULY, prediction, ("gold",))


def wait_for_end(process_id):
    stat = Path(f"/proc/{process_id}/stat")
    for _ in range(200):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {process_id} still runs")


def test_the_pool_gives_the_values_of_score_in_order():
    items = [Item(metric, f"fox {i}", ("fox 1", "2")) for metric in ("em", "f1", "sub_em") for i in range(20)]
    with RewardPool(workers=2) as pool:
        values = [result.value for result in pool.map(items)]
    assert values == [score(item.metric, item.prediction, item.answers) for item in items]


@pytest.mark.parametrize(
    ("prediction", "error"),
    [
        ("hang", "took longer than 1 s"),
        ("crash", "ended its process (signal 9)"),
        ("exit", "ended its process (exit code 3)"),
        ("raise", "raised LookupError: no such thing"),
        ("nan", "gave nan"),
        ("text", "gave 'much', which is not a finite number"),
        ("number as text", "gave '0.5', which is not a finite number"),
        ("nothing", "gave None, which is not a finite number"),
    ],
)
def test_an_answer_that_breaks_its_metric_costs_only_its_own_score(prediction, error):
    with RewardPool(workers=1, timeout=1.0) as pool:
        before, broken, after = pool.map([unruly("fine"), unruly(prediction), unruly("fine")])
    assert broken.value == 0.0
    assert error in broken.error
    assert (before.value, before.error) == (after.value, after.error) == (1.0, None)


def test_what_a_metric_prints_disturbs_nothing():
    with RewardPool(workers=1) as pool:
        assert [result.value for result in pool.map([unruly("print"), unruly("fine")])] == [1.0, 1.0]


def test_time_spent_waiting_for_a_worker_does_not_count_as_the_metrics():
    with RewardPool(workers=1, timeout=1.0) as pool:
        results = pool.map([unruly("hang"), unruly("hang"), unruly("fine")])
    assert [result.value for result in results] == [0.0, 0.0, 1.0]


def test_a_worker_that_died_while_idle_costs_nobody_a_score():
    item = Item("unruly_metrics:process_id", "", ("gold",))
    with RewardPool(workers=1) as pool:
        first = int(pool.score(item).value)
        os.kill(first, 9)
        wait_for_end(first)
        second = pool.score(item)
    assert second.error is None
    assert int(second.value) != first


async def test_the_event_loop_runs_on_while_answers_are_scored():
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    ticking = asyncio.create_task(tick())
    with RewardPool(workers=2, timeout=0.5) as pool:
        results = await pool.map_async([unruly("hang"), unruly("fine"), Item("em", "a", ("a",))])
    ticking.cancel()
    assert [result.value for result in results] == [0.0, 1.0, 1.0]
    assert ticks > 5


def test_an_unknown_metric_is_refused_before_any_work():
    with RewardPool(workers=1) as pool, pytest.raises(ValueError, match=r"'subem'; did you mean 'sub_em'\?"):
        pool.submit(Item("subem", "a", ("a",)))


def test_a_metric_that_cannot_be_found_is_recorded():
    with RewardPool(workers=1) as pool:
        missing, after = pool.map([Item("nowhere:f", "a", ("a",)), Item("em", "a", ("a",))])
    assert "there is no module nowhere" in missing.error
    assert after.value == 1.0


@pytest.mark.parametrize("settings", [{"workers": 0}, {"timeout": 0.0}])
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ValueError, match="must be"):
        RewardPool(**settings)


def test_closing_ends_items_under_way():
    pool = RewardPool(workers=1, timeout=60.0)
    pool.score(unruly("fine"))
    under_way, waiting = pool.submit(unruly("hang")), pool.submit(unruly("fine"))
    while not under_way.running():
        time.sleep(0.01)
    time.sleep(0.2)
    pool.close()
    assert "ended its process (signal 9)" in under_way.result().error
    assert waiting.cancelled()


def test_workers_import_no_jax_even_for_a_program_that_did():
    # The pool is used at the top level of the main module, where multiprocessing would need a guard.
    program = """
import sys, types
sys.modules["jax"] = types.ModuleType("jax")
from memjax.rewards.pool import Item, RewardPool
with RewardPool(workers=1) as pool:
    print(pool.score(Item("unruly_metrics:jax_was_imported", "", ("gold",))))
"""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "Score(value=0.0, error=None)", run.stderr


def test_workers_end_with_a_program_that_is_killed():
    program = """
import os
from memjax.rewards.pool import Item, RewardPool
pool = RewardPool(workers=1)
print(int(pool.score(Item("unruly_metrics:process_id", "", ("gold",))).value), flush=True)
os.kill(os.getpid(), 9)
"""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    wait_for_end(int(run.stdout))


def test_a_worker_that_cannot_start_is_no_items_fault(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with RewardPool(workers=1) as pool:
        with pytest.raises(RuntimeError, match=r"did not start .* \(exit code 1\)"):
            pool.score(unruly("fine"))
        monkeypatch.undo()
        assert pool.score(Item("em", "a", ("a",))).value == 1.0
