"""From pinned inputs to an engine image: recipe, build context, builder Job, registry client."""

from .builder import builder_objects, buildkitd_toml
from .config import BuildConfig
from .context import context_files, dockerfile
from .errors import BuildError, RegistryError
from .failure import Failure, diagnose, failure_sentence
from .job import build_name, build_objects, image_reference
from .recipe import Recipe, push_repository, push_secret, recipe_digest, recipe_from_spec
from .reference import Reference, parse_reference
from .registry import Credentials, RegistryClient, credentials_from_docker_config
from .result import BuildResult, job_result
from .series import known_series, load_plugins, load_series, series_from_config_map

__all__ = [
    "BuildConfig",
    "BuildError",
    "BuildResult",
    "Credentials",
    "Failure",
    "Recipe",
    "Reference",
    "RegistryClient",
    "RegistryError",
    "build_name",
    "build_objects",
    "builder_objects",
    "buildkitd_toml",
    "context_files",
    "credentials_from_docker_config",
    "diagnose",
    "dockerfile",
    "failure_sentence",
    "image_reference",
    "job_result",
    "known_series",
    "load_plugins",
    "load_series",
    "parse_reference",
    "push_repository",
    "push_secret",
    "recipe_digest",
    "recipe_from_spec",
    "series_from_config_map",
]
