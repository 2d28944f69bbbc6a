"""Finding and claiming control groups: from recorded texts, and for v2 on a directory that stands in for the
kernel's files. What the kernel does with them is tested by the provider conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from ficc.domain.plan import Limits
from ficc.executor import machine
from ficc.executor.cgroups import LEAF, PAGE, Group, Mounts, Tree, kill_directories, read_mounts, sweep

V1 = """\
25 20 0:22 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:9 - tmpfs tmpfs ro,mode=755
28 25 0:25 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid,nodev,noexec shared:13 - cgroup cgroup rw,cpu,cpuacct
29 25 0:26 / /sys/fs/cgroup/memory rw,nosuid shared:14 - cgroup cgroup rw,memory
30 25 0:27 / /sys/fs/cgroup/pids rw,nosuid shared:15 - cgroup cgroup rw,pids
31 25 0:28 / /sys/fs/cgroup/freezer rw,nosuid shared:16 - cgroup cgroup rw,freezer
32 25 0:29 / /sys/fs/cgroup/systemd rw,nosuid shared:10 - cgroup cgroup rw,xattr,name=systemd
33 25 0:30 / /sys/fs/cgroup/net_cls,net_prio rw shared:17 - cgroup cgroup rw,net_cls,net_prio
"""
V1_OWN = """\
7:net_cls,net_prio:/
6:freezer:/
5:pids:/user.slice/user-0.slice/session-2.scope
4:memory:/user.slice
3:cpu,cpuacct:/user.slice
1:name=systemd:/user.slice/user-0.slice/session-2.scope
"""
HYBRID = V1 + "34 25 0:31 / /sys/fs/cgroup/unified rw,nosuid shared:18 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID_OWN = V1_OWN + "0::/user.slice/user-0.slice/session-2.scope\n"
V2 = "25 20 0:22 / /sys/fs/cgroup rw,nosuid,nodev,noexec shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V2_OWN = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/ficc.scope\n"
CONTROLLERS = "cpuset cpu io memory hugetlb pids rdma misc\n"
LIMITS = Limits(cpu_millis=1500, memory_bytes=(64 << 20) + 1, swap_bytes=PAGE + 1, processes=20)


# Where things are.


def test_v1() -> None:
    root = Path("/sys/fs/cgroup")
    assert read_mounts(V1, V1_OWN) == Mounts(
        {
            "cpu": root / "cpu,cpuacct/user.slice",
            "memory": root / "memory/user.slice",
            "pids": root / "pids/user.slice/user-0.slice/session-2.scope",
            "freezer": root / "freezer",
        },
        None,
    )


def test_hybrid() -> None:
    mounts = read_mounts(HYBRID, HYBRID_OWN)
    assert mounts.v1 == read_mounts(V1, V1_OWN).v1
    assert mounts.v2 == Path("/sys/fs/cgroup/unified/user.slice/user-0.slice/session-2.scope")


def test_v2_of_systemd() -> None:
    own = "user.slice/user-1000.slice/user@1000.service/app.slice/ficc.scope"
    assert read_mounts(V2, V2_OWN) == Mounts({}, Path("/sys/fs/cgroup") / own)


@pytest.mark.parametrize(
    ("root", "own", "expected"),
    [
        ("/", "/", "/sys/fs/cgroup"),  # a cgroup namespace
        ("/docker/abc", "/docker/abc", "/sys/fs/cgroup"),  # none, and the mount shows the container's own
        ("/docker/abc", "/docker/abc/inner", "/sys/fs/cgroup/inner"),
        (
            "/docker/abc",
            "/docker/abcdef",
            "/sys/fs/cgroup/docker/abcdef",
        ),  # not below: the name only begins so
        ("/", "/docker/abc", "/sys/fs/cgroup/docker/abc"),
    ],
)
def test_containers(root: str, own: str, expected: str) -> None:
    mountinfo = f"25 20 0:22 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    assert read_mounts(mountinfo, f"0::{own}\n").v2 == Path(expected)


def test_names_with_spaces() -> None:
    mountinfo = r"25 20 0:22 / /mnt/c\040group rw - cgroup2 cgroup2 rw" + "\n"
    assert read_mounts(mountinfo, "0::/a b\n").v2 == Path("/mnt/c group/a b")


def test_the_first_mount_of_a_hierarchy_counts() -> None:
    again = "99 25 0:26 / /elsewhere rw - cgroup cgroup rw,memory\n"
    assert read_mounts(V1 + again, V1_OWN).v1["memory"] == Path("/sys/fs/cgroup/memory/user.slice")


def test_no_cgroups_at_all() -> None:
    assert read_mounts("22 27 0:21 / /proc rw - proc proc rw\n", "") == Mounts({}, None)


# Claiming.


def delegated(path: Path, controllers: str = CONTROLLERS, processes: str = "", *, root: bool = False) -> Path:
    """The files of a v2 group, as the kernel has them."""
    path.mkdir(parents=True)
    (path / "cgroup.controllers").write_text(controllers)
    (path / "cgroup.procs").write_text(processes)
    (path / "cgroup.subtree_control").write_text("")
    if not root:
        (path / "cgroup.type").write_text("domain\n")
    return path


def v2_tree(own: Path, name: str = "ficc-x") -> Tree:
    """A tree below a v2 group; the kernel would make the files of limits in it."""
    (own / name).mkdir()
    (own / name / "memory.swap.max").touch()
    return Tree(name, Mounts({}, own))


def test_a_delegated_group_is_claimed(tmp_path: Path) -> None:
    own = delegated(tmp_path / "ficc.scope", processes="41\n")
    tree = v2_tree(own)
    assert tree.unenforceable == {}
    assert tree.v2 == own / "ficc-x"
    assert tree.v1 == {}
    assert (own / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (own / "ficc-x/cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    # v2 has no processes in inner groups: those that were there moved to a leaf.
    assert (own / LEAF / "cgroup.procs").read_text() == "41"


def test_the_group_of_an_earlier_executor_is_claimed_again(tmp_path: Path) -> None:
    """Started once more from where the first one moved itself."""
    own = delegated(tmp_path / "ficc.scope")
    leaf = delegated(own / LEAF, processes="42\n")
    (own / "ficc-x").mkdir()
    (own / "ficc-x/memory.swap.max").touch()
    tree = Tree("ficc-x", Mounts({}, leaf))
    assert tree.unenforceable == {}
    assert tree.v2 == own / "ficc-x"


def test_the_root_group_may_keep_its_processes(tmp_path: Path) -> None:
    own = delegated(tmp_path / "cgroup", processes="1\n2\n", root=True)
    assert v2_tree(own).unenforceable == {}
    assert not (own / LEAF).exists()


def test_a_group_without_the_controllers(tmp_path: Path) -> None:
    tree = Tree("ficc-x", Mounts({}, delegated(tmp_path / "x", "cpu pids")))
    assert set(tree.unenforceable) == {"cpu_millis", "memory_bytes", "swap_bytes", "processes"}
    assert "no cgroup controller for memory" in tree.unenforceable["memory_bytes"]
    assert "systemd-run" in tree.unenforceable["memory_bytes"]


def test_a_group_that_cannot_be_seen(tmp_path: Path) -> None:
    tree = Tree("ficc-x", Mounts({}, tmp_path / "gone"))
    assert "cannot be seen from here" in tree.unenforceable["processes"]


def test_a_group_that_does_not_let_us(tmp_path: Path) -> None:
    """As one that belongs to somebody else: writing to it fails."""
    own = delegated(tmp_path / "x")
    (own / "cgroup.subtree_control").unlink()
    (own / "cgroup.subtree_control").mkdir()
    assert "is not delegated" in Tree("ficc-x", Mounts({}, own)).unenforceable["processes"]


def test_swap_that_is_not_accounted(tmp_path: Path) -> None:
    own = delegated(tmp_path / "x")
    tree = Tree("ficc-x", Mounts({}, own))
    assert set(tree.unenforceable) == {"swap_bytes"}
    assert "swapaccount=1" in tree.unenforceable["swap_bytes"]


def test_nothing_is_there() -> None:
    tree = Tree("ficc-x", Mounts({}, None))
    assert set(tree.unenforceable) == {"cpu_millis", "memory_bytes", "swap_bytes", "processes"}
    assert tree.leftovers() == []
    assert tree.group("a").processes() == set()
    assert tree.group("a").kill()
    assert tree.group("a").remove()


def test_v1_that_is_not_there_for_us(tmp_path: Path) -> None:
    mounts = Mounts({name: tmp_path / "gone" / name for name in ("cpu", "memory", "pids", "freezer")}, None)
    assert "is not writable" in Tree("ficc-x", mounts).unenforceable["memory_bytes"]


# Groups on v2.


@pytest.fixture
def group(tmp_path: Path) -> Group:
    group = v2_tree(delegated(tmp_path / "own")).group("attempt")
    group.create(LIMITS)
    return group


def test_v2_limits(group: Group) -> None:
    assert group.v2 is not None
    written = {path.name: path.read_text() for path in group.v2.iterdir()}
    assert written == {
        "cpu.max": "150000 100000",
        "memory.max": str(64 << 20),
        "memory.swap.max": str(PAGE),
        "memory.oom.group": "1",
        "pids.max": "20",
    }
    assert group.limits() == {
        "cpu_millis": 1500,
        "memory_bytes": 64 << 20,
        "swap_bytes": PAGE,
        "processes": 20,
    }


def test_v2_limits_that_are_not_there(group: Group) -> None:
    assert group.v2 is not None
    (group.v2 / "cpu.max").write_text("max 100000\n")
    (group.v2 / "memory.max").write_text("max\n")
    assert group.limits()["cpu_millis"] == -1
    assert group.limits()["memory_bytes"] == -1


def test_v2_events(group: Group) -> None:
    assert group.v2 is not None
    assert group.oom_kills() == 0
    (group.v2 / "memory.events").write_text("low 0\nhigh 0\nmax 4\noom 1\noom_kill 2\noom_group_kill 1\n")
    (group.v2 / "pids.events").write_text("max 3\n")
    (group.v2 / "memory.current").write_text("12345\n")
    assert group.oom_kills() == 2
    assert group.process_limit_hits() == 3
    assert group.memory_bytes() == 12345


def test_v2_members(group: Group) -> None:
    assert group.v2 is not None
    (group.v2 / "cgroup.procs").write_text("0\n7\n8\n")  # 0: a process of another pid namespace
    assert group.join_files() == [group.v2 / "cgroup.procs"]
    assert group.processes() == {7, 8}
    assert group.holds(7)
    assert group.has(8)
    assert not group.has(9)


def test_v2_kill(group: Group) -> None:
    """`cgroup.kill` is written; a group that does not empty is not said to be empty."""
    assert group.v2 is not None
    (group.v2 / "cgroup.kill").touch()
    (group.v2 / "cgroup.procs").write_text(f"{2**22 + 1}\n")  # above any process id
    assert sweep([group.v2])
    assert (group.v2 / "cgroup.kill").read_text() == "1"
    assert not kill_directories([group.v2], seconds=0.02)
    (group.v2 / "cgroup.procs").write_text("")
    assert kill_directories([group.v2])
    assert not sweep([group.v2])


def test_leftovers_and_removal(tmp_path: Path) -> None:
    own = delegated(tmp_path / "own")
    tree = v2_tree(own)
    assert tree.v2 is not None
    for name in ("b", "a"):
        (tree.v2 / name).mkdir()
    assert tree.leftovers() == ["a", "b"]
    assert tree.group("a").remove()
    assert tree.group("a").remove()
    assert tree.leftovers() == ["b"]


# What holds for all of it.


def test_no_ceiling(tmp_path: Path) -> None:
    assert v2_tree(delegated(tmp_path / "own")).ceiling() == {}


def test_the_ceiling_is_the_least_above(tmp_path: Path) -> None:
    slice_ = delegated(tmp_path / "slice")
    own = delegated(slice_ / "ficc.scope")
    for group, memory, cpu, pids in (
        (slice_, "4000000", "300000 100000", "max"),
        (own, "8000000", "max 100000", "500"),
    ):
        (group / "memory.max").write_text(memory)
        (group / "cpu.max").write_text(cpu)
        (group / "pids.max").write_text(pids)
    tree = v2_tree(own)
    assert tree.ceiling() == {"memory_bytes": 4_000_000, "cpu_millis": 3000, "processes": 500}
    reserve = 1_000_000
    capacity = machine.capacity(reserve, tree.ceiling())
    assert capacity.memory_bytes == 3_000_000
    assert capacity.cpu_millis <= 3000
    assert capacity.processes == 500 // machine.PROCESSES_SHARE
    assert machine.capacity(reserve, {}).memory_bytes > 3_000_000


def test_the_ceiling_on_v1(tmp_path: Path) -> None:
    own = {name: tmp_path / name / "docker" for name in ("cpu", "memory", "pids", "freezer")}
    for path in own.values():
        path.mkdir(parents=True)
    (own["memory"] / "memory.limit_in_bytes").write_text("4096000\n")
    (own["memory"].parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (own["cpu"] / "cpu.cfs_quota_us").write_text("-1\n")
    (own["cpu"] / "cpu.cfs_period_us").write_text("100000\n")
    assert Tree("ficc-x", Mounts(own, None)).ceiling() == {"memory_bytes": 4_096_000}
