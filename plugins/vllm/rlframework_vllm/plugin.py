from rlframework.plugins.hookspec import hookimpl
