"""Each module has a test file that mirrors its path, or `COVERED_BY` names the file that tests it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
from helpers import ROOT

SOURCE, TESTS = ROOT / "src" / "quarantune", ROOT / "tests"
MODULES = sorted(
    str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if path.name not in ("__init__.py", "_version.py")
)
COVERED_BY = {
    "values/errors.py": "behaviour/contained/test_shortages.py",
    "answers/by_rule.py": "unit/api/test_fit.py",
    "cli/fitting.py": "unit/api/test_fit.py",
    "__main__.py": "unit/cli/test_entry_point.py",
    "answers/answer.py": "unit/answers/test_ladder.py",
    "answers/assigned.py": "unit/tuning/test_contextual_job.py",
    "answers/memory.py": "unit/api/test_autotune.py",
    "answers/nearest.py": "unit/answers/test_layers.py",
    "answers/why_missed.py": "behaviour/remembered/test_on_miss.py",
    "api/ahead.py": "unit/answers/test_recording.py",
    "api/assembly.py": "unit/answers/test_ladder.py",
    "api/contextual.py": "unit/tuning/test_contextual_job.py",
    "api/tune_many.py": "system/test_other_autotuners.py",
    "api/tuner.py": "unit/api/test_tune_for.py",
    "cache/entries.py": "unit/api/test_tuning_cache.py",
    "cache/owner.py": "unit/cache/test_claims.py",
    "cache/problems.py": "unit/cache/test_store.py",
    "calls/call.py": "unit/functions/test_description.py",
    "calls/key.py": "unit/tuning/test_compile_verdicts.py",
    "calls/program.py": "unit/answers/test_saved_program.py",
    "calls/rebuilt.py": "unit/tuning/test_verification.py",
    "cli/call_texts.py": "unit/cli/test_entry_point.py",
    "cli/calls.py": "unit/cli/test_entry_point.py",
    "cli/capabilities.py": "unit/cli/test_entry_point.py",
    "cli/output.py": "unit/cli/test_entry_point.py",
    "cli/pages.py": "unit/cache/test_sweeps.py",
    "cli/parser.py": "unit/cli/test_entry_point.py",
    "cli/saved.py": "unit/cli/test_entry_point.py",
    "device_table.py": "unit/test_spaces.py",
    "engine/place.py": "system/test_engines.py",
    "engine/remote.py": "system/test_engine_faults.py",
    "functions/binding.py": "unit/functions/test_description.py",
    "functions/describe.py": "unit/functions/test_description.py",
    "functions/names.py": "unit/api/test_autotune.py",
    "functions/object_parts.py": "unit/functions/test_description.py",
    "functions/versions.py": "behaviour/remembered/test_applicable_results.py",
    "host/interpreter.py": "behaviour/isolation/test_restricted_processes.py",
    "host/interruptions.py": "unit/sandbox/test_workforce.py",
    "host/locks.py": "behaviour/isolation/test_forks_and_signals.py",
    "host/packages.py": "unit/functions/test_importable.py",
    "host/process.py": "unit/sandbox/test_pool.py",
    "jax_internals/jax_arrays.py": "unit/transport/test_payload.py",
    "jax_internals/jax_backends.py": "unit/transport/test_payload.py",
    "jax_internals/jax_functions.py": "unit/transport/test_payload.py",
    "jax_internals/jax_options.py": "behaviour/isolation/test_jax_state.py",
    "jax_internals/jax_traces.py": "behaviour/isolation/test_tracing.py",
    "jax_internals/kernels.py": "unit/worker/test_estimates.py",
    "jax_internals/other_processes.py": "behaviour/remembered/test_reused_programs.py",
    "measure/clocks.py": "unit/measure/test_finals.py",
    "measure/device_clock.py": "unit/measure/test_finals.py",
    "measure/observers/energy.py": "unit/measure/test_objective.py",
    "measure/sampling.py": "unit/measure/test_finals.py",
    "ray.py": "system/test_engines.py",
    "results/from_cache.py": "unit/results/test_html_report.py",
    "results/report_data.py": "unit/results/test_html_report.py",
    "results/unfinished.py": "unit/cache/test_sweeps.py",
    "sandbox/forker.py": "unit/sandbox/test_pool.py",
    "sandbox/messages.py": "unit/scheduler/test_replies.py",
    "sandbox/program_file.py": "unit/transport/test_programs.py",
    "sandbox/shortages.py": "behaviour/contained/test_shortages.py",
    "sandbox/spawning.py": "unit/sandbox/test_pool.py",
    "sandbox/spool.py": "unit/sandbox/test_pool.py",
    "sandbox/template_messages.py": "unit/sandbox/test_pool.py",
    "scheduler/bursts.py": "unit/scheduler/test_loop.py",
    "scheduler/plan.py": "unit/scheduler/routes/test_choosing.py",
    "scheduler/recall.py": "unit/answers/test_saved_program.py",
    "scheduler/routes/apart.py": "behaviour/contained/test_ranked_configs.py",
    "scheduler/routes/base.py": "unit/scheduler/routes/test_choosing.py",
    "scheduler/routes/compiled_only.py": "unit/scheduler/routes/test_choosing.py",
    "scheduler/routes/handed_over.py": "unit/scheduler/routes/test_choosing.py",
    "scheduler/routes/here.py": "unit/scheduler/routes/test_choosing.py",
    "scheduler/routes/prepared_ahead.py": "unit/scheduler/test_screening.py",
    "scheduler/routes/split.py": "unit/scheduler/routes/test_choosing.py",
    "scheduler/routes/together.py": "unit/scheduler/test_fastest.py",
    "scheduler/run_state.py": "unit/scheduler/test_loop.py",
    "scheduler/verdicts.py": "unit/scheduler/test_loop_endings.py",
    "search/fields.py": "unit/search/test_strategy.py",
    "search/models.py": "unit/search/test_strategy.py",
    "search/optuna_search.py": "unit/search/test_strategy.py",
    "search/random_search.py": "unit/search/test_strategy.py",
    "search/surrogate.py": "unit/search/test_strategy.py",
    "sweep/limits.py": "unit/sweep/test_searching.py",
    "sweep/processes.py": "behaviour/isolation/test_measured_here.py",
    "sweep/proof.py": "behaviour/correct_winner/test_program_proof.py",
    "sweep/request.py": "behaviour/isolation/test_measured_here.py",
    "sweep/routes.py": "behaviour/contained/test_contained.py",
    "sweep/sweep.py": "unit/tuning/test_contextual_job.py",
    "sweep/this_process.py": "unit/sandbox/test_workforce.py",
    "transport/assignment.py": "unit/tuning/test_contextual_job.py",
    "transport/classes.py": "unit/transport/test_payload.py",
    "transport/differentiation.py": "unit/measure/test_compare.py",
    "transport/manual_axes.py": "behaviour/isolation/test_collectives.py",
    "transport/pickling.py": "unit/transport/test_payload.py",
    "transport/process_state.py": "unit/transport/test_payload.py",
    "transport/program_text.py": "unit/answers/test_saved_program.py",
    "transport/unpicklable.py": "unit/transport/test_payload.py",
    "tuning/claim_and_journal.py": "behaviour/isolation/test_measured_here.py",
    "tuning/job.py": "unit/tuning/test_compile_verdicts.py",
    "tuning/reuse.py": "behaviour/remembered/test_reused_programs.py",
    "tuning/starts.py": "unit/answers/test_layers.py",
    "values/amounts.py": "unit/values/test_settings.py",
    "values/blocks.py": "unit/values/test_settings.py",
    "values/forgetting.py": "behaviour/remembered/test_changed_settings.py",
    "values/options.py": "unit/sandbox/test_pool.py",
    "values/texts.py": "unit/results/test_progress.py",
    "values/trial.py": "unit/measure/test_finals.py",
    "worker/arguments.py": "unit/sandbox/test_pool.py",
    "worker/bench.py": "unit/measure/test_rounding.py",
    "worker/compiling.py": "unit/measure/test_rounding.py",
    "worker/deviceless.py": "unit/transport/test_programs.py",
    "worker/main.py": "unit/transport/test_programs.py",
}
"""Test files, in `tests/`, of the modules that have no file of their own in `tests/unit/`."""
IN_PROCESSES = {
    "answers/by_rule.py",
    "cli/fitting.py",
    "__main__.py",
    "answers/assigned.py",
    "answers/memory.py",
    "answers/why_missed.py",
    "api/ahead.py",
    "api/assembly.py",
    "api/contextual.py",
    "api/tune_many.py",
    "calls/program.py",
    "cli/capabilities.py",
    "cli/output.py",
    "cli/pages.py",
    "cli/saved.py",
    "device_table.py",
    "engine/place.py",
    "functions/describe.py",
    "functions/object_parts.py",
    "host/interpreter.py",
    "jax_internals/jax_arrays.py",
    "jax_internals/jax_traces.py",
    "ray.py",
    "sandbox/forker.py",
    "sandbox/program_file.py",
    "sandbox/spawning.py",
    "scheduler/bursts.py",
    "scheduler/routes/compiled_only.py",
    "scheduler/routes/handed_over.py",
    "scheduler/routes/here.py",
    "scheduler/routes/prepared_ahead.py",
    "scheduler/routes/split.py",
    "scheduler/routes/together.py",
    "scheduler/run_state.py",
    "scheduler/verdicts.py",
    "sweep/processes.py",
    "search/random_search.py",
    "transport/classes.py",
    "transport/manual_axes.py",
    "transport/process_state.py",
    "transport/unpicklable.py",
    "values/forgetting.py",
    "worker/deviceless.py",
    "worker/main.py",
}
"""Modules that their tests run without importing them: through a call, a command or a worker."""


def own_file(module: str) -> Path:
    path = Path(module)
    return TESTS / "unit" / path.parent / f"test_{path.name}"


@functools.cache
def imported(file: Path) -> set[str]:
    """Returns the modules of the package that a test file imports, also in its functions and scripts."""
    text, found = file.read_text(encoding="utf-8"), set()
    scripts = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    for source in (text, *(script for script in scripts if isinstance(script, str) and "import" in script)):
        try:
            nodes = [*ast.walk(ast.parse(source))]
        except SyntaxError:
            continue
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_its_test_file(module: str) -> None:
    if own_file(module).exists():
        assert module not in COVERED_BY, "its own file suffices"
        return
    assert module in COVERED_BY, f"write {own_file(module)}, or name the file that tests it"
    file = TESTS / COVERED_BY[module]
    dotted = ".".join(["quarantune", *Path(module).with_suffix("").parts])
    assert module in IN_PROCESSES or dotted in imported(file), f"{COVERED_BY[module]} does not import it"
    assert module not in IN_PROCESSES or file.exists()


def test_no_line_names_a_module_that_is_gone() -> None:
    assert not {*COVERED_BY, *IN_PROCESSES} - {*MODULES}


def test_folders_of_unit_tests_mirror_packages() -> None:
    folders = {str(path.parent.relative_to(TESTS / "unit")) for path in (TESTS / "unit").rglob("test_*.py")}
    assert not [folder for folder in sorted(folders) if not (SOURCE / folder).is_dir()]


def test_unit_tests_are_named_after_modules() -> None:
    """A file may name an aspect after its module: `test_loop_deadlines.py` tests `loop.py`."""
    astray = []
    for path in sorted((TESTS / "unit").rglob("test_*.py")):
        words = path.stem.removeprefix("test_").split("_")
        package = SOURCE / path.parent.relative_to(TESTS / "unit")
        stems = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
        if not any((package / f"{stem}.py").exists() for stem in stems):
            astray.append(str(path.relative_to(TESTS)))
    assert not astray
