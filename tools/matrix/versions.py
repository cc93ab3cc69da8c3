"""Which versions the matrix is made of."""

# The oldest server that is supported, and the newest of each later minor release; the last is the newest of all.
SERVERS = ("2.10.27", "2.11.11", "2.12.8", "2.14.6", "2.15.1")

# The newest of each minor release of Airflow, with what it needs beside its own metadata.
# Airflow 3.2's own API server doesn't start with later versions of these, though its metadata allows them.
OLDER_PACKAGES = ("cadwyn<8", "fastapi<0.137")
AIRFLOWS: dict[str, tuple[str, ...]] = {"3.1.8": OLDER_PACKAGES, "3.2.2": OLDER_PACKAGES, "3.3.2": ()}
# What a release of Airflow itself doesn't support, though uv installs it.
UNSUPPORTED = {("3.1.8", "3.14"): "Airflow 3.1.8 declares Python before 3.14, and its scheduler ends there"}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

# What tests need beside the package; its extras come with it.
TEST_PACKAGES = (
    "cryptography",
    "httpx",
    "hypothesis",
    "jsonschema",
    "pillow",
    "psutil",
    "pytest",
    "pytest-asyncio",
    "pytest-mock",
    "pytest-timeout",
)

# How uv resolves: the lowest versions that pyproject.toml allows, or the newest of all.
LOWEST, NEWEST = "lowest-direct", "highest"
# What the lowest Airflow doesn't import with, though its metadata allows it.
LOWEST_NEEDS = ("structlog<25.5", *OLDER_PACKAGES)
DEPENDENCIES = ((LOWEST, "3.11"), (NEWEST, "3.13"), (NEWEST, "3.14"))
