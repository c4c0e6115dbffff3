from moe_serve.launcher.cli import main

main()
