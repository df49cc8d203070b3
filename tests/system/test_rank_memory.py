"""Where one rank keeps its parameters and gradients: offloaded to the host, and between the backwards of an update."""

from pathlib import Path

from support.one_rank import results_of_rank

OFFLOADED = """
import torch
from titan_rl.actors.sync.held_shards import shards_of
from titan_rl.actors.sync.staging import Staging
from titan_rl.actors.titan.model import TitanModel, local
from titan_rl.actors.vllm.vllm_params import pieces
from titan_rl.wire.weight_plan import plan

# The seams: pinning copies, as it does on a GPU's host, but into ordinary memory; and the device counts as a GPU.
pinned = set()
def pin_memory(tensor, *_):
    copy = tensor.clone()
    pinned.add(copy.untyped_storage().data_ptr())
    return copy
torch.Tensor.pin_memory = pin_memory
torch.Tensor.is_pinned = lambda tensor, *_: tensor.untyped_storage().data_ptr() in pinned
TitanModel._offloads = property(lambda model: model.config.training.enable_cpu_offload)

shape = shape_of(config.model)
part = SnapshotPart(f"/proc/{os.getpid()}/fd/{os.memfd_create('part')}", 1)
tokens = list(range(3, 20))
asked = pack([Sample(tokens, [1] * len(tokens))], shards=1, seq_len=32, rows_per_microbatch=1, pad_id=0)[0]

def packed(model):  # what generators would read
    params = {model.names[name]: p for name, p in model.model.named_parameters()}
    shards = shards_of(model.model.named_parameters(), model.names)
    copies = plan([shards], [pieces(shape, tp=1, rank=0)]).outgoing(0)
    staging = Staging(params, copies, torch.float32, slice_bytes=1 << 20, block_bytes=1 << 20)
    (manifest,) = staging.pack(1, 0, 1).values()
    return list(manifest.checksums)

for offloads in (False, True):
    given = replace(
        config,
        job=replace(config.job, dump_folder=str(folder / str(offloads))),
        training=replace(config.training, enable_cpu_offload=offloads, max_norm=0.5),
    )
    model = RoleModel("trainer", given, shape, given.parallelism)
    model.begin_phase("rl", 0)
    hf = folder / str(offloads) / "hf"
    model.write(hf)
    (hf / "config.json").write_text(json.dumps(shape.hf_config(bos=1, eos=2, pad=0)))
    model.load_weights(str(hf), "reference")
    stats = [step(model) for _ in range(2)]
    model.phase.save(2, "{}")
    model.phase.snapshot(2, "{}", part)
    model.phase.settle()
    at_two = model.checksum()
    stats.append(step(model))
    resumed = []
    for at in (2, part):
        model.begin_phase("rl", at)
        resumed.append([model.checksum() == at_two, step(model) == stats[2]])
    lent, checksum = model.scores(asked, 1.0, "reference")
    tell(
        pinned=sorted({local(p).is_pinned() for p in model.model.parameters()}),
        resumed=resumed,
        same=[stats, model.checksum(), [answer.tolist() for answer in lent], checksum, packed(model)],
    )
"""


def test_offloaded_parameters_train_sync_and_resume_as_those_on_the_device(tmp_path: Path) -> None:
    on_device, offloaded = results_of_rank(OFFLOADED, tmp_path)
    assert (on_device["pinned"], offloaded["pinned"]) == ([False], [True])
    assert offloaded["resumed"] == on_device["resumed"] == [[True, True]] * 2
    assert offloaded["same"] == on_device["same"]


INTERRUPTED = """
model = RoleModel("trainer", config, shape_of(config.model), config.parallelism)
model.begin_phase("rl", 0)
whole = step(model)
for compute in ("float32", "bfloat16"):
    given = replace(config, training=replace(config.training, mixed_precision_param=compute))
    model = RoleModel("trainer", given, shape_of(config.model), config.parallelism)
    model.begin_phase("rl", 0)
    tokens = list(range(3, 15))
    samples = [Sample(tokens, [0] + [1] * 11) for _ in range(6)]
    (batch,) = pack(samples, shards=1, seq_len=32, rows_per_microbatch=1, pad_id=0)
    broken = replace(batch, microbatches=[*batch.microbatches[:2], None])
    try:
        model.accumulate(broken)
    except AttributeError:
        model.begin_phase("rl", 0)
        interrupted = step(model)
    other = RoleModel("trainer", given, shape_of(config.model), config.parallelism)
    other.begin_phase("rl", 0)
    tell(interrupted=interrupted, whole=step(other))
"""


def test_an_interrupted_update_leaves_no_gradients_for_the_next_phase(tmp_path: Path) -> None:
    for found in results_of_rank(INTERRUPTED, tmp_path):
        assert found["interrupted"] == found["whole"]
