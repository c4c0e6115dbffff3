"""`moe-serve serve`."""

import os

import typer

import moe_serve
from moe_serve.launcher.cli.command import takes
from moe_serve.launcher.cli.serve_options import ServeOptions


@takes(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a model: all ranks of this machine and the HTTP front end. Ctrl-C ends everything."""
    from moe_serve.launcher.cli.flags import effective_config
    from moe_serve.launcher.cli.serve_options import with_flags
    from moe_serve.launcher.display import StartDisplay
    from moe_serve.launcher.preflight import look_for_files
    from moe_serve.launcher.system import serve_on_this_machine
    from moe_serve.server.edge.keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE

    for variable, key in ((API_KEY_VARIABLE, options.api_key), (ADMIN_KEY_VARIABLE, options.admin_api_key)):
        if key is not None:
            os.environ[variable] = key  # not a setting: settings are shown
    settings = effective_config(options.config, options.settings(), options.overrides or ())
    if options.print_config:
        typer.echo(settings.to_yaml(), nl=False)
        return
    look_for_files(settings)
    with StartDisplay(settings.parallel.num_ranks, with_flags, settings.server.log_format) as display:
        changed = "\n".join(f"  {each}" for each in settings.changed())
        display.heading(f"moe-serve {moe_serve.__version__}; settings other than defaults:\n{changed}", style="dim")
        code = serve_on_this_machine(settings, display)
    raise typer.Exit(code)
