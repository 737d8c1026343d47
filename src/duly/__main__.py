from duly.cli import main

main()
