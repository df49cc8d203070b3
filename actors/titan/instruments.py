"""TorchTitan's instruments on a rank that trains: profiler, garbage collection, FLOPs, device memory, and its spans."""

import logging
import os
import threading

import torch
from torchtitan.observability.structured_logger import init_structured_logger
from torchtitan.tools.profiler import Profiler
from torchtitan.tools.utils import GarbageCollection

from titan_rl.actors.titan.compiled_blocks import graphs_compiled
from titan_rl.actors.titan.model import TitanModel, shared_keys
from titan_rl.kernels.peak_flops import known_peak_flops
from titan_rl.wire.reports import COMPILED, MEMORY
from titan_rl.wire.spans import span

STEPS_PER_COLLECTION = 50  # steps between collections of Python's garbage


class Instruments:
    """Measures the steps of one phase. Garbage is collected on all ranks at once, and at no other time."""

    def __init__(self, model: TitanModel, folder: str, step: int) -> None:
        config = model.config
        record_titan_spans()
        self.tokens = 0  # in the rows of the step, padding included, whether or not other ranks compute parts of them
        self.unshared = 0  # that it would have seen if samples shared none
        self._garbage = GarbageCollection(gc_freq=STEPS_PER_COLLECTION)
        self._profiler = Profiler(
            shared_keys(Profiler.Config, config.profiling),
            global_step=step,
            base_folder=config.job.dump_folder,
            leaf_folder=folder,  # the critic's ranks have the policy's numbers
        ).__enter__()
        _, flops = model.spec.model.get_nparams_and_flops(model.model, config.training.seq_len)
        parts = model.row_parts.count if model.row_parts else 1
        self._flops_per_token = flops / (model.dims.non_data_parallel_size * parts)
        self._compiles = model.titan.compile.enable
        self._graphs = graphs_compiled()
        self._memory, self._peak_flops = None, None
        self._device = model.device
        if model.device.type == "cuda":
            from torchtitan.components.metrics import build_device_memory_monitor  # imports TensorBoard

            self._memory = build_device_memory_monitor()
            self._peak_flops = known_peak_flops(self._memory.device_name)

    def end_step(self, step: int, seconds: float) -> dict[str, float]:
        """Advance the profiler and the garbage collection, and return the step's metrics by their logged names."""
        self._garbage.run(step)
        self._profiler.step()
        flops = self.tokens * self._flops_per_token / max(seconds, 1e-9)
        metrics = {"tokens/shared": 1 - self.tokens / max(self.unshared, 1)}
        self.tokens = self.unshared = 0
        before, self._graphs = self._graphs, graphs_compiled()
        if self._compiles:
            metrics[COMPILED] = self._graphs - before
        if self._graphs == before:  # else most of the seconds are the compiler's
            metrics["throughput/tflops"] = flops / 1e12
            if self._peak_flops is not None:
                metrics["throughput/mfu"] = 100 * flops / self._peak_flops
        if self._memory is not None:
            peaks = self._memory.get_peak_stats()._asdict()
            metrics |= {f"memory/{name}": float(value) for name, value in peaks.items()}
            free, total = torch.cuda.mem_get_info(self._device)
            metrics[MEMORY] = (total - free - torch.cuda.memory_reserved(self._device)) / 2**30
            self._memory.reset_peak_stats()
        return metrics

    def stop_profiler(self) -> None:
        self._profiler.__exit__(None, None, None)


def record_titan_spans() -> None:
    """Send TorchTitan's structured log (checkpoint_save, gc_collect, ...) to this process's timeline."""
    os.environ.setdefault("TITAN_STRUCT_LOGGER_HANDLERS", f"{__name__}.add_span_handler")
    init_structured_logger(source="titan_rl", output_dir="")


def add_span_handler(structured_logger: logging.Logger, **_: object) -> None:
    structured_logger.addHandler(SpanHandler())


class SpanHandler(logging.Handler):
    """Records each end of a TorchTitan span, whose value is its milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()  # the recorder is for one thread, the actor's

    def emit(self, record: logging.LogRecord) -> None:
        fields = vars(record)
        name = str(fields.get("log_type_name"))
        own_event = threading.get_ident() == self._thread and fields.get("log_type") == "event"
        if own_event and name.endswith("_end"):
            span.since(span.now() - round(1e6 * fields["value"]), name.removesuffix("_end"))
