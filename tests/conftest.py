"""Settings of all tests: nothing is timed, so a busy machine fails nothing."""

from pathlib import Path

from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("untimed")

# What takes longest comes first, lest one file be left for the end, where nothing runs beside it.
_LONGEST = (
    "train/test_run",
    "loss/test_tensor",
    "launch/",
    "train/",
    "plugin/",
    "loss/test_bench",
    "teacher/",
    "loss/",
)


def pytest_collection_modifyitems(items):
    def place(item):
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        return next((place for place, prefix in enumerate(_LONGEST) if path.startswith(prefix)), len(_LONGEST))

    items.sort(key=place)
