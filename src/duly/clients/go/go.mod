module duly

go 1.26.0

require (
	github.com/eclipse/paho.mqtt.golang v1.5.1
	golang.org/x/crypto v0.58.0
)

require (
	github.com/gorilla/websocket v1.5.3 // indirect
	golang.org/x/net v0.60.0 // indirect
	golang.org/x/sync v0.17.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
)
