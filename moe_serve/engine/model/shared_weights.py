"""One copy of the weights for all ranks of a host, which they make together or find in a folder (model.weight_cache).

    all ranks    tell each other their hosts; those of one host share a copy, and the lowest of them leads
    leader       takes a finished file of the folder, whose bytes it checks, or a new one, there or in memory
    all          read experts into a new file, each those that it serves first; the leader also what is dense
    leader       packs that as it builds its decoder, waits for the others' experts, and finishes the file
    the others   wait for that, and build their decoders from what is packed

Experts are in the file where one host has all ranks: slots only name them then, so replicas, moves and lost ranks cost
no bytes. On several hosts a rank keeps the experts of its slots, as without a copy. Ranks that are bound to different
NUMA nodes are here as if on different hosts, since the memory of another node is slow to read.

Prefill and decode ranks of one launcher share a copy, too: it gives both groups files in memory that nobody has filled
yet, and the leader that comes first does.

A rank that is started anew maps the file of a living one of its node. No collective is called while weights are read,
which takes long: a rank that waits looks at words in memory, and at the processes that it waits for.
"""

import contextlib
import fcntl
import json
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.config import ServeConfig, model_dir
from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.peer_calls import gather_bytes
from moe_serve.dispatch.shared_files import FileMark, SharedFiles, weights_of
from moe_serve.dispatch.shm.memory import host_mark
from moe_serve.engine.model.model_plan import ModelPlan, checkpoint_folder
from moe_serve.ep.expert_form import scale_of
from moe_serve.eplb.placement import Placement
from moe_serve.errors import ConfigError, ModelError, PeerError
from moe_serve.log import get_logger
from moe_serve.models.gguf_file import gguf_files
from moe_serve.models.weight_file import ExpertPlaces, Experts, WeightReader, WeightWriter, map_file
from moe_serve.models.weight_plan import ExpertTensor, dense_tensors
from moe_serve.models.weight_share import WeightShare
from moe_serve.models.weights import ExpertRoom, LoadedWeights, no_weights
from moe_serve.process_facts import is_private, not_private, own_node, runs

MEMORY, NONE = "memory", "none"  # of model.weight_cache, beside a folder
_SPARE_BYTES = 64 << 20  # for what dense weights are padded by, beside a quarter
_LOOK_S = 0.005  # between two looks at what other ranks do
_LOCK_S = 0.1  # between two looks at a file that another launch makes
log = get_logger(__name__)
Read = Callable[[WeightShare, ExpertRoom | None], LoadedWeights]
Report = Callable[[str, float], None]


@dataclass(frozen=True)
class Sharing:
    """What the ranks of a host share. dense: all but experts;  experts: also these, of which slots are names then"""

    dense: bool
    experts: bool

    @classmethod
    def of(cls, config: ServeConfig, plan: ModelPlan, num_ranks_here: int) -> "Sharing":
        """Returns it for a host with so many of the ranks."""
        cache = config.model.weight_cache
        are_several = num_ranks_here > 1 or config.parallel.num_prefill_ranks > 0
        shares = plan.numerics.compiled and cache != NONE and (cache != MEMORY or are_several)
        return cls(shares, shares and num_ranks_here == plan.placement.num_ranks)


def open_shared_weights(
    config: ServeConfig, plan: ModelPlan, group: EpGroup, report: Report, files: Sequence[int] = ()
) -> "SharedWeights | None":
    """Returns this rank's part in the copy that it shares; None: it has its own. Collective, unless it joins later.

    files: descriptors of memory of the launcher, for ranks that are bound to no NUMA node, and to each; (): none
    Raises ConfigError for a folder that others can write to, PeerError where a rank of this host fails meanwhile.
    """
    if not plan.numerics.compiled or config.model.weight_cache == NONE:
        return None
    if group.is_replacement:
        assert group.files is not None, "a rank that joins others has their files"
        name = weights_of(own_node())
        if not group.files.has(name):
            return None
        return SharedWeights(plan, group.rank, None, None, group.files.open(name, os.O_RDONLY))
    ranks = _who_shares(group)
    sharing = Sharing.of(config, plan, len(ranks))
    if not sharing.dense:
        return None
    board = _Board(group, ranks, config.server.attach_deadline_s)
    with board.telling_failure():
        new, descriptor = None, -1
        if board.leads:
            report("looking for packed weights", 0.0)
            new, descriptor = _choose(config, plan, sharing.experts, files)
            board.show_file(descriptor, _READY if new is None else _FILL)
        else:
            descriptor = board.wait_for_file(report)
        if group.files is not None:
            group.files.keep(weights_of(own_node()), descriptor)
        return SharedWeights(plan, group.rank, board, new, descriptor)


def _who_shares(group: EpGroup) -> Sequence[int]:
    """Returns the ranks of this rank's host, user, and NUMA node where they are bound to one; ascending."""
    if group.process_group is None:
        return [group.rank]
    hosts = gather_bytes(f"{host_mark()} {os.geteuid()} {own_node()}".encode(), group.process_group)
    return [rank for rank, host in enumerate(hosts) if host == hosts[group.rank]]


class SharedWeights:
    """One rank's part in a copy of the weights.

    num_bytes: of the copy, once it is finished;  has_experts: it holds all experts
    num_sharing: ranks that opened it together; 1: this one has joined ranks that serve
    was_there: it was finished before this rank came
    in_memory: it is this rank's new one, and has no name
    """

    def __init__(self, plan: ModelPlan, rank: int, board: "_Board | None", new: "_NewFile | None", descriptor: int):
        """board: of the ranks that make it; None: it was finished before;  new: the leader's file, if it makes one"""
        self._plan, self._rank, self._board, self._new, self._descriptor = plan, rank, board, new, descriptor
        self._writer: WeightWriter | None = None
        self.in_memory = new is not None and new.path is None
        self.num_bytes, self.has_experts = 0, False
        self.num_sharing = 1 if board is None else board.num_ranks
        self.was_there = board is None or board.is_finished

    def load(self, share: WeightShare, read: Read, report: Report) -> LoadedWeights:
        """Returns the weights of this rank, of which it reads its part where the copy is new.

        read: reads a share, with room for its experts
        """
        if self._board is None or self.was_there:
            return self._mapped(share, read, None)
        with self._board.telling_failure():
            return self._make(self._board, share, read, report)

    def _make(self, board: "_Board", share: WeightShare, read: Read, report: Report) -> LoadedWeights:
        self.has_experts = board.has_all_ranks
        part, room = replace(share, has_dense=board.leads), None
        places = _places(self._plan, self.has_experts)
        if self.has_experts:
            part = replace(part, placement=_filled_by(self._plan.placement, self._rank), rank=0)
            room = _room_in(places.views(map_file(self._descriptor, places.end, writable=True)))
        loaded = read(part, room)
        if self._new is None:
            board.show_done()
            board.wait_for_leader(report)
            return self._mapped(share, read, loaded)
        self._writer = WeightWriter(self._descriptor, self._new.size, places)
        matrices = {plan.name for plan in dense_tensors(share.spec) if plan.kind == "matrix"}
        vectors = {
            name: tensor for name, tensor in loaded.dense.items() if name not in matrices and isinstance(tensor, Tensor)
        }
        self._writer.add_vectors(vectors)
        experts = places.views(self._writer.data) if self.has_experts else loaded.experts
        return replace(loaded, experts=experts, memory=self._writer, held=self._held())

    def _mapped(self, share: WeightShare, read: Read, loaded: LoadedWeights | None) -> LoadedWeights:
        """Returns the weights of a finished copy. loaded: what this rank has read; None: nothing yet"""
        reader = WeightReader(self._descriptor)
        self.num_bytes, self.has_experts = len(reader.data), bool(reader.experts.layers)
        if loaded is None and not self.has_experts:
            loaded = read(replace(share, has_dense=False), None)
        num_read = 0 if loaded is None else loaded.bytes_read
        experts = loaded.experts if loaded is not None and not self.has_experts else reader.experts.views(reader.data)
        dense = no_weights(replace(share, device="meta")).dense | reader.vectors()  # packed ones by their shape
        return LoadedWeights(dense, experts, share.slot_forms, num_read, share.activations, reader, self._held())

    @property
    def facts(self) -> dict[str, Any]:
        """What /server_info shows."""
        return {"num_bytes": self.num_bytes, "has_experts": self.has_experts, "was_there": self.was_there}

    def described(self, cache: str) -> str:
        """Returns a line for the log. cache: model.weight_cache"""
        what = "weights" if self.has_experts else "weights without experts"
        where = "in memory" if self.in_memory else f"in a file in {cache}{', found there' * self.was_there}"
        return f"{what}: {self.num_bytes / 2**30:.2f} GiB, once for all ranks of this host, {where}"

    def _held(self) -> Mapping[int, NDArray[np.int32]] | None:
        placement = self._plan.placement
        if not self.has_experts:
            return None
        return {layer: placement.by_rank[row, self._rank] for row, layer in enumerate(placement.moe_layer_ids)}

    def finish(self, report: Report) -> None:
        """Finishes a new copy, on the leader, whose decoder is built."""
        if self._board is None or self._new is None or self._writer is None:
            return
        with self._board.telling_failure():
            self._board.wait_for_others(report)
            report("finishing the weights", 1.0)
            self._writer.finish(self._new.key, with_sums=self._new.path is not None)
            self._new.publish()
        self.num_bytes, self._writer = self._writer.num_bytes, None
        self._board.show_file(self._descriptor, _READY)


def _places(plan: ModelPlan, has_experts: bool) -> ExpertPlaces:
    return ExpertPlaces.of(plan.share(0).slot_forms if has_experts else {}, plan.placement.num_logical)


def _filled_by(placement: Placement, rank: int) -> Placement:
    """Returns the experts that a rank reads into the copy, each in the slot of its number: those it holds first."""
    table = np.full((placement.num_layers, placement.num_logical), -1, dtype=np.int32)
    first = placement.logical_to_physical[:, :, 0] // placement.slots_per_rank
    rows, experts = np.nonzero(first == rank)
    table[rows, experts] = experts
    return Placement(table, placement.num_logical, 1, placement.moe_layer_ids, allow_lost=True)


def _room_in(views: Experts) -> ExpertRoom:
    def room(plan: ExpertTensor) -> dict[str, Tensor]:
        layer = views[plan.layer_id]
        return {name: layer[name] for name in (plan.name, scale_of(plan.name)) if name in layer}

    return room


# ---- what the ranks of a host tell each other

_UNDECIDED, _FILL, _READY = range(3)  # states of the file
_WORKS, _DONE, _FAILED = range(3)  # of a rank
_STATE, _MARK, _RANKS = 0, 1, 8  # words: the state of the file, where it is, then two for each rank: process, state


class _Board:
    """Words in memory of the leader that the ranks which share a copy have mapped; each writes its own.

    leads: this rank does;  num_ranks: there are;  has_all_ranks: there are no others
    """

    def __init__(self, group: EpGroup, ranks: Sequence[int], deadline_s: float):
        """Collective. deadline_s: how long a rank waits for others"""
        self._ranks, self._rank, self._deadline_s = ranks, group.rank, deadline_s
        self.leads, self.num_ranks = group.rank == ranks[0], len(ranks)
        self.has_all_ranks = len(ranks) == group.num_ranks
        size, files = 8 * (_RANKS + 2 * len(ranks)), SharedFiles()
        mine = -1
        if self.leads:
            mine = os.memfd_create("moe_serve_weights_state")
            os.ftruncate(mine, size)
            files.keep("state", mine)
        if group.process_group is not None:
            told = json.dumps([os.getpid(), *files.marks()["state"]]) if self.leads else ""
            pid, *mark = json.loads(gather_bytes(told.encode(), group.process_group)[ranks[0]])
            if not self.leads:
                files = SharedFiles(pid, {"state": FileMark(*mark)})
                mine = files.open("state", os.O_RDWR)
        self._words = np.frombuffer(mmap.mmap(mine, size), dtype=np.int64)
        os.close(mine)
        self._own = _RANKS + 2 * ranks.index(group.rank)
        self._words[self._own] = os.getpid()
        if self.leads:  # whose file has no name: it stays open until all have mapped it
            self._until(
                lambda: bool(self._words[_RANKS::2].all()), "map the state of the weights", lambda phase, part: None
            )
        files.close()

    @property
    def is_finished(self) -> bool:
        return int(self._words[_STATE]) == _READY

    def show_file(self, descriptor: int, state: int) -> None:
        """Shows the others the leader's file."""
        facts = os.fstat(descriptor)
        self._words[_MARK : _MARK + 3] = descriptor, facts.st_dev, facts.st_ino
        self._words[_STATE] = state

    def wait_for_file(self, report: Report) -> int:
        """Returns a descriptor of the leader's file."""
        self._until(lambda: int(self._words[_STATE]) != _UNDECIDED, "choose the file of the weights", report)
        mark = FileMark(*map(int, self._words[_MARK : _MARK + 3]))
        theirs = SharedFiles(int(self._words[_RANKS]), {"weights": mark})
        flags = os.O_RDONLY if self.is_finished else os.O_RDWR
        descriptor = theirs.open("weights", flags)
        theirs.close()
        return descriptor

    def show_done(self) -> None:
        self._words[self._own + 1] = _DONE

    def wait_for_leader(self, report: Report) -> None:
        self._until(lambda: self.is_finished, "pack the weights", report)

    def wait_for_others(self, report: Report) -> None:
        self._words[self._own + 1] = _DONE
        self._until(lambda: bool((self._words[_RANKS + 1 :: 2] == _DONE).all()), "read experts", report)

    @contextlib.contextmanager
    def telling_failure(self) -> Iterator[None]:
        """Lets the others know where the block raises, so that they do not wait."""
        try:
            yield
        except BaseException:
            self._words[self._own + 1] = _FAILED
            raise

    def _until(self, is_so: Callable[[], bool], what: str, report: Report) -> None:
        """Waits for other ranks. what: they are to do. Raises PeerError naming one that cannot, or is late"""
        deadline_s = time.monotonic() + self._deadline_s
        report(f"waiting for other ranks to {what}", 1.0)
        while not is_so():
            processes, states = self._words[_RANKS::2].tolist(), self._words[_RANKS + 1 :: 2].tolist()
            for rank, pid, state in zip(self._ranks, processes, states, strict=True):
                if state == _FAILED or (pid and not runs(pid)):
                    text = f"rank {rank} ended while it should {what}; see its last lines"
                    raise PeerError(text, rank, "loading weights", 0)
            if time.monotonic() > deadline_s:
                text = f"other ranks did not {what} within server.attach_deadline_s = {self._deadline_s:g} s; raise it"
                raise PeerError(text, -1, "loading weights", 0)
            time.sleep(_LOOK_S)


# ---- the file


@dataclass
class _NewFile:
    """A file that the leader makes. size: room for all weights

    path: where it lies once it is finished; None: in memory alone;  lock: held meanwhile; -1: none
    """

    descriptor: int
    size: int
    key: str
    path: Path | None = None
    lock: int = -1

    def publish(self) -> None:
        """Gives a finished file its name. Who finds it compares its bytes, so none need have reached the disk."""
        if self.path is not None:
            os.replace(_unfinished(self.path), self.path)
        if self.lock >= 0:
            os.close(self.lock)


def _unfinished(path: Path) -> Path:
    return path.with_suffix(".part")


def _choose(
    config: ServeConfig, plan: ModelPlan, has_experts: bool, files: Sequence[int]
) -> tuple[_NewFile | None, int]:
    """Returns a new file, or None for a finished one, and its descriptor. files: as for open_shared_weights"""
    size = _most_bytes(plan, has_experts)
    if config.model.weight_cache != MEMORY:
        folder = Path(config.model.weight_cache).expanduser()
        try:
            return _in_folder(_usable(folder), config, plan, has_experts, size)
        except OSError as error:
            log.warning(
                "%s takes no file of %.2f GiB with packed weights (%s): they lie in memory alone, and the next start "
                "packs them again", folder, size / 2**30, error.strerror,
            )  # fmt: skip
    number = own_node() + 1
    if config.model.weight_cache == MEMORY and number < len(files):
        found = _in_launcher(f"/proc/self/fd/{files[number]}", weights_made_from(config, plan, has_experts), size)
        if found is not None:
            return found
    descriptor = os.memfd_create("moe_serve_weights")
    os.ftruncate(descriptor, size)
    return _NewFile(descriptor, size, ""), descriptor


def _most_bytes(plan: ModelPlan, has_experts: bool) -> int:
    """Returns what the weights take at most."""
    dense = sum(plan.share(0).dense_bytes.values())
    return _places(plan, has_experts).end + dense + dense // 4 + _SPARE_BYTES


def _usable(folder: Path) -> Path:
    """Returns the folder, made where it is missing. Raises ConfigError where others can write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder.stat()):
        raise ConfigError(not_private("model.weight_cache", folder))
    return folder


def _in_folder(
    folder: Path, config: ServeConfig, plan: ModelPlan, has_experts: bool, size: int
) -> tuple[_NewFile | None, int]:
    """Returns what `_choose` does. Raises OSError where there is no room."""
    source, key = model_dir(config.model), weights_made_from(config, plan, has_experts)
    names = json.dumps([str(source.resolve()), config.model.load_format, plan.slot_form.label, has_experts, own_node()])
    path = folder / f"{source.stem}-{blake2b(names.encode(), digest_size=8).hexdigest()}.weights"
    lock = _lock(path.with_suffix(".lock"))
    try:
        if (found := _find(path, key)) >= 0:
            os.close(lock)
            return None, found
        part = _unfinished(path)
        part.unlink(missing_ok=True)  # of a launch that was killed
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # writing to a page without room would end the process
        except OSError:
            os.close(descriptor)
            part.unlink()
            raise
    except OSError:
        os.close(lock)
        raise
    return _NewFile(descriptor, size, key, path, lock), descriptor


def _in_launcher(path: str, key: str, size: int) -> tuple[_NewFile | None, int] | None:
    """Returns what `_choose` does, of a file that the ranks of both roles have; None: it holds something else.

    What was written there is never changed, since ranks of the other role may have mapped it.
    """
    lock = _locked(os.open(path, os.O_RDWR | os.O_CLOEXEC), "the weights of both roles")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(lock).st_size == 0:
        os.ftruncate(descriptor, size)
        return _NewFile(descriptor, size, key, lock=lock), descriptor
    os.close(lock)
    try:
        if WeightReader(descriptor).key == key:
            return None, descriptor
        why = "they are of other files than when the launch began"
    except ModelError as error:
        why = f"the ranks that made it have ended: {error}"
    os.close(descriptor)
    log.warning("the copy of the weights for both roles is not used (%s): this role has its own", why)
    return None


def _lock(path: Path) -> int:
    """Returns a descriptor that holds a lock, for which it waits as long as another launch makes the file."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    return _locked(lock, str(path.with_suffix(".weights")))


def _locked(lock: int, what: str) -> int:
    """Locks an open file, and returns it. what: its holder makes"""
    said = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if not said:
                log.info("another launch makes %s; this one waits for it", what)
            said = True
            time.sleep(_LOCK_S)


def _find(path: Path, key: str) -> int:
    """Returns a descriptor of a finished file of these weights, whose bytes are right; -1: there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return -1
    except OSError as error:
        log.warning("%s cannot be used (%s): it is made anew", path, error.strerror)
        return -1
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or not is_private(facts):
            raise ModelError("it belongs to another user, or others can write to it")
        reader = WeightReader(descriptor)
        if reader.key != key:
            raise ModelError("the checkpoint, its form or this program has changed")
        started_s = time.monotonic()
        reader.check()
        log.info("%s: %.2f GiB checked in %.1f s", path, len(reader.data) / 2**30, time.monotonic() - started_s)
        return descriptor
    except ModelError as error:
        os.close(descriptor)
        log.warning("%s cannot be used (%s): it is made anew", path, error)
        return -1


class ModelFiles:
    """The files of a model as they are now. marks: by name, their size in bytes and when they were changed, in ns"""

    def __init__(self, config: ServeConfig):
        """Raises ModelError where parts of a GGUF file are missing."""
        self._config, self._source = config, model_dir(config.model)
        files = sorted(self._source.iterdir()) if self._source.is_dir() else gguf_files(self._source)
        self.marks: dict[str, tuple[int, int]] = {}
        for file in files:
            if file.suffix in (".safetensors", ".json", ".gguf"):
                with contextlib.suppress(FileNotFoundError):  # it is removed just now
                    facts = file.stat()
                    self.marks[file.name] = facts.st_size, facts.st_mtime_ns

    def check_same(self) -> None:
        """Raises ModelError naming the files that others have replaced or changed since, so that what was read has no
        name."""
        now = ModelFiles(self._config).marks
        changed = sorted(name for name in {*self.marks, *now} if self.marks.get(name) != now.get(name))
        if changed:
            raise ModelError(
                f"{self._source}: {', '.join(changed[:4])} changed while this rank read the model; start again once "
                "all its files are there"
            )


def weights_made_from(config: ServeConfig, plan: ModelPlan, has_experts: bool) -> str:
    """Returns all that decides about the bytes of packed weights, as text: equal texts, equal weights."""
    drawn = config.model.seed if checkpoint_folder(config) is None else None
    marks = list(ModelFiles(config).marks.items())
    return json.dumps([marks, drawn, repr(plan.share(0).slot_forms), repr(plan.stored), has_experts, _digest_of_code()])


def _digest_of_code() -> str:
    """Returns a hash of the Python code that reads, converts and packs weights."""
    package = Path(__file__).parents[2]
    texts = [
        path.read_bytes() for name in ("ep", "kernels", "models") for path in sorted((package / name).rglob("*.py"))
    ]
    return blake2b(b"\0".join(texts), digest_size=16).hexdigest()
