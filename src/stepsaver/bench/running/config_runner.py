"""Runs one config in a session, a chunk at a time."""

import time
from collections.abc import Sequence

import torch
from lm_eval.api.instance import Instance

from stepsaver.bench.experiment.configs import ConfigSpec
from stepsaver.bench.experiment.spec import Experiment
from stepsaver.bench.machine.facts import gpu_name, peak_memory
from stepsaver.bench.results.timing import Timing
from stepsaver.bench.running.session import Session
from stepsaver.bench.running.step_counts import count_steps
from stepsaver.engine.cost import cost_by_kind, trace_cost
from stepsaver.engine.other_work import OtherWork
from stepsaver.engine.row_costs import planning_of, predicted_total
from stepsaver.engine.trace import Trace
from stepsaver.evaluation.adapter import AdapterSettings, StepsaverLM
from stepsaver.evaluation.records import InferencePath, RequestRecord
from stepsaver.evaluation.throughput import Meter


class ConfigRunner:
    """One config in a session: runs a chunk and says what it took."""

    def __init__(self, session: Session, experiment: Experiment, config: ConfigSpec, path: InferencePath) -> None:
        spec = experiment.spec
        self.session, self.config, self.path = session, config, path
        self.engine = session.engine(experiment, config)
        if path == "scoring":
            self.engine.check_estimator(spec.estimator)
        self.found: list[RequestRecord] = []
        settings = AdapterSettings(
            default_new_tokens=spec.decoding.max_new_tokens,
            token_limit=spec.max_new_tokens,
            estimator=spec.estimator,
            show_progress=False,
        )
        self.lm = StepsaverLM(self.engine, session.tokenizer, settings=settings, on_record=self.found.append)

    def run_chunk(
        self, requests: Sequence[Instance], *, chunk: int, samples: int
    ) -> tuple[list[RequestRecord], Timing]:
        """Returns the answers to a chunk's requests, and their timing. Warm-up is not counted."""
        self.found.clear()
        self.engine.forward_rows = self.session.forward_rows
        warm = self.lm.meters[self.path].warm_up_seconds
        meter = Meter(self.path, Trace(), warm_up_seconds=warm)
        self.lm.meters[self.path] = meter
        others = OtherWork()
        if self.path == "generation":
            self.lm.generate_until(list(requests), disable_tqdm=True)
        else:
            self.lm.loglikelihood(list(requests), disable_tqdm=True)
        assert len(self.found) == len(requests), "every request has an answer"
        records = sorted(self.found, key=lambda record: record.key)
        return records, self._timing(meter, chunk, samples, others.cores())

    def _timing(self, meter: Meter, chunk: int, samples: int, other_cores: float | None) -> Timing:
        trace, config = meter.trace, self.engine.model.config
        cost = trace_cost(config, trace, self.engine.model.dtype.itemsize, self.engine.model.bytes_per_weight)
        row_costs, planning = self.session.row_costs, planning_of(self.engine.rules, config.layers)
        return Timing(
            chunk=chunk,
            session=self.session.identity,
            comparable=self.session.is_alone,
            when=time.time(),
            samples=samples,
            requests=meter.requests,
            tokens=meter.tokens,
            seconds=trace.decode_seconds,
            predicted_seconds=predicted_total(row_costs, trace.records, planning) if row_costs else None,
            prefill_seconds=trace.prefill_seconds,
            warm_up_seconds=meter.warm_up_seconds,
            forwards=cost.forwards,
            denoising_steps=cost.steps,
            flops=cost.flops,
            row_layers=cost.mlp_row_layers,
            row_layers_reused=cost.mlp_row_layers_reused,
            by_kind=cost_by_kind(config, trace),
            steps=count_steps(trace),
            sample_forwards=trace.sample_forwards,
            planning_seconds=trace.planning_seconds,
            peak_memory_bytes=peak_memory(self.engine.model.device),
            loading_seconds=self.session.loading_seconds,
            gpu=gpu_name(self.engine.model.device),
            other_cores=other_cores,
            threads=torch.get_num_threads(),
        )
