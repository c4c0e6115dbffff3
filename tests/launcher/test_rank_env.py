import pytest

from moe_serve.errors import LaunchError
from moe_serve.launcher.rank_env import RankEnv, check_num_ranks, free_port, interface_towards, read_rank_env

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "5",
    "TORCHELASTIC_RUN_ID": "none",
}


def test_torchrun_variables_are_read() -> None:
    assert read_rank_env(TORCHRUN) == RankEnv(3, 4, 1, 2, "10.0.0.1", 29500, 0, "torchrun", 3)


def test_the_launch_that_moe_serve_serve_has_drawn_is_read() -> None:
    drawn = {"MOE_SERVE_LAUNCH_ID": "77", "MOE_SERVE_RESTARTS_LEFT": "3"}
    ours = {name: value for name, value in TORCHRUN.items() if "ELASTIC" not in name} | drawn
    env = read_rank_env(ours)
    assert (env.launch_id, env.restarts_left) == (77, 3)


def test_slurm_variables_are_read() -> None:
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"}
    env = read_rank_env(slurm | {"MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert (env.rank, env.num_ranks, env.local_rank, env.num_local_ranks, env.source) == (1, 2, 1, 2, "srun")
    with pytest.raises(LaunchError, match="MASTER_ADDR is not set"):
        read_rank_env(slurm)


def test_a_process_started_by_hand_is_alone() -> None:
    env = read_rank_env({})
    assert (env.rank, env.num_ranks, env.source) == (0, 1, "single process")
    with pytest.raises(LaunchError, match=r"num_ranks is 2 .* `torchrun --nproc-per-node 2"):
        check_num_ranks(env, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "x"}, "RANK is 'x', expected a whole number"),
        ({"RANK": None}, "RANK is not set"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"RANK": "4"}, "RANK is 4 with WORLD_SIZE 4"),
    ],
)
def test_a_wrong_variable_is_named(change: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(LaunchError, match=message):
        read_rank_env(environ)


def test_another_number_of_ranks_than_configured_is_refused_with_the_fix() -> None:
    with pytest.raises(LaunchError, match=r"torchrun started 4 ranks .* --set parallel.num_ranks=4"):
        check_num_ranks(read_rank_env(TORCHRUN), 8)
    check_num_ranks(read_rank_env(TORCHRUN), 4)


def test_a_free_port_can_be_bound() -> None:
    assert 1024 <= free_port() <= 65535


def test_loopback_is_reached_by_lo() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no such host") is None
