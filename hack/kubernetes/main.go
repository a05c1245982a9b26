// One program that holds the five programs of Kubernetes, its client, and the release of etcd with which Kubernetes is
// tested. It acts by the name that it is called by, so that they are compiled, linked and stored once; the cache of
// hack/cluster links the seven names to it.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	_ "time/tzdata" // time zones of CronJobs

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // metrics of the API clients
	_ "k8s.io/component-base/metrics/prometheus/version"  // kubernetes_build_info
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// Constructors by program. Only kubectl's is called for its defaults, so the map holds values of any type:
// the signatures differ between the releases that this file must compile with.
var programs = map[string]any{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllers.NewControllerManagerCommand,
	"kube-proxy":              proxy.NewProxyCommand,
	"kube-scheduler":          scheduler.NewSchedulerCommand,
	"kubectl":                 kubectl.NewDefaultKubectlCommand,
	"kubelet":                 kubelet.NewKubeletCommand,
}

func command(constructor any) *cobra.Command {
	switch create := constructor.(type) {
	case func() *cobra.Command:
		return create()
	case func(context.Context) *cobra.Command:
		return create(context.Background())
	case func(...scheduler.Option) *cobra.Command:
		return create()
	}
	panic(fmt.Sprintf("a constructor of type %T: hack/kubernetes/main.go must learn it", constructor))
}

func main() {
	name := filepath.Base(os.Args[0])
	if name == "etcd" {
		etcdmain.Main(os.Args) // returns after a signal
		return
	}
	constructor, found := programs[name]
	if !found {
		fmt.Fprintf(os.Stderr, "%s: expected to be called as one of: etcd", name)
		for known := range programs {
			fmt.Fprintf(os.Stderr, " %s", known)
		}
		fmt.Fprintln(os.Stderr)
		os.Exit(2)
	}
	os.Exit(cli.Run(command(constructor)))
}
