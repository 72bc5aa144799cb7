"""Which boxes of which global tensors a rank holds, computed from integers."""

if __name__ != "shardplan.layouts":
    raise ImportError(
        f"{__name__}: this folder is installed as shardplan.layouts, and under another name its "
        "modules would be loaded twice. Run scripts/setup_venv and import shardplan.layouts."
    )
