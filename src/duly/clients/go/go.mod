module duly

go 1.24.0

require (
	github.com/eclipse/paho.mqtt.golang v1.5.1
	golang.org/x/crypto v0.44.0
)

require (
	github.com/gorilla/websocket v1.5.3 // indirect
	golang.org/x/net v0.47.0 // indirect
	golang.org/x/sync v0.18.0 // indirect
	golang.org/x/sys v0.38.0 // indirect
)
