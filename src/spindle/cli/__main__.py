from spindle.cli.main import main

main()
